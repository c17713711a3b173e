"""Inside of a job the ranks run the tests; outside, each test starts a job or waits for one."""

import os

if "HVD_TEST_PARALLEL" in os.environ:
    from tests.plugin.inside import *  # noqa: F403
else:
    from tests.plugin.outside import *  # noqa: F403
