#!/bin/sh
# The bundle's ./run: the checks and measurements. Where the system lacks a library that the program needs to start, it
# gets all of those that the bundle brings.
case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
here=$(CDPATH='' cd -- "$here" && pwd) || exit
if ! "$here/moonring-gpu" --help >/dev/null 2>&1; then
    LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$here/.mooncake/lib
    export LD_LIBRARY_PATH
fi
"$here/moonring-gpu" "$@"
status=$?
if [ "$status" -gt 2 ]; then
    # It did not start, or died, and so has reported nothing.
    echo "moonring-gpu ended with status $status: this system's C library may be too old" >&2
    printf '%s' '{"checks":1,"device":null,"event_signal_to_issue_us":null,"facts":[],"failed":1,"failures":["moonring-gpu"],'
    echo '"launch_slowdown":null,"overlap_ratio":null,"skipped":[],"timeline_signal_to_issue_us":null}'
fi
exit "$status"
