"""Entry point of ``python -m benchmarks.gpu``."""

import signal
import sys

from benchmarks.gpu.command import main, stop

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
