#!/bin/sh
ulimit -v 1589248  # kB: 1552 MiB of addresses a process
exec "$@"
