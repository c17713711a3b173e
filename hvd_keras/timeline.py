"""``python -m hvd_keras.timeline FILE``: opens a timeline in Perfetto by a link.

Perfetto (https://ui.perfetto.dev) runs in the browser. It may fetch a file from port 9001 of the
machine that the browser runs on, and from no other, so this program serves the file there.
"""

from __future__ import annotations

import argparse
import http.server
import sys
import urllib.parse
from pathlib import Path

PERFETTO = "https://ui.perfetto.dev"
PORT = 9001  # the one that Perfetto's page allows


def serve(file: Path) -> None:
    """Print a link and serve the file, to Perfetto alone, until it has been fetched once.

    Raises:
        OSError: the file cannot be read, or the port is in use.
    """
    content = file.read_bytes()
    path = "/" + urllib.parse.quote(file.name)
    fetched = False

    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = 1.0  # seconds; a browser may connect in advance, and send nothing

        def do_GET(self) -> None:
            nonlocal fetched
            if self.path != path:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", PERFETTO)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            fetched = True

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", PORT), Handler) as server:
        print(f"{PERFETTO}/#!/?url=http://127.0.0.1:{PORT}{path}", flush=True)
        while not fetched:
            server.handle_request()


def main() -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hvd_keras.timeline",
        description="Prints a link that opens a timeline in Perfetto, and serves the file for it.",
    )
    parser.add_argument("file", type=Path, help="the file of hvdrun --timeline")
    file = parser.parse_args().file
    try:
        serve(file)
    except OSError as error:
        print(f"timeline: cannot serve {file} at port {PORT}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
