"""The error for a job that the launcher refuses."""


class UsageError(Exception):
    """The job cannot be started as asked; the text says what was got and expected."""


# A file in the folder of a call (`run_function`): no UsageError comes any more, so that an exit
# status of 2 is the function's.
STARTED = "started"
