#!/bin/sh
ulimit -v 1740800  # kB: 1700 MiB of addresses a process
exec "$@"
