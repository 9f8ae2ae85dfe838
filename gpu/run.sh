#!/bin/sh
# The bundle's ./run: the checks and measurements. Where the system lacks a library that the program needs to start, it
# gets all of those that the bundle brings.
here=$(cd "${0%/*}" && pwd) || exit
if ! "$here/moonring-gpu" --help >/dev/null 2>&1; then
    LD_LIBRARY_PATH=$here/.mooncake/lib
    export LD_LIBRARY_PATH
fi
exec "$here/moonring-gpu" "$@"
