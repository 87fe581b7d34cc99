#!/usr/bin/env bash
# Checks Consort on this machine's first GPU: `device-check.sh [--only PART,..] [--out DIR]`. Ends within 4.5 minutes,
# prints a table last, and leaves report.json and report.md in DIR (else in $OUT, else in ./device-check-report).
# Needs the driver; takes cuBLASLt and, for comparisons, PyTorch from the first Python here that has it.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
limit=${CONSORT_DEVICE_CHECK_SECONDS:-262}

# The first interpreter whose PyTorch sees the GPU; the check does without where there is none.
python=
for candidate in ${CONSORT_DEVICE_CHECK_PYTHON:-} python3 /opt/*/.venv/bin/python3 /opt/*/bin/python3 /usr/bin/python3; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    if "$candidate" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null; then
        python=$candidate
        break
    fi
done

# Containers mount the driver's libraries where the loader need not look.
for folder in /usr/local/nvidia/lib64 /usr/local/nvidia/lib; do
    [ -e "$folder/libcuda.so.1" ] && export LD_LIBRARY_PATH="$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" && break
done

arguments=(run --limit "$limit")
case " $* " in *" --out "* | *" --out="*) ;; *) arguments+=(--out "${OUT:-device-check-report}") ;; esac
if [ -n "$python" ]; then
    # Its wheels have the libraries that the driver does not bring.
    prefix=$("$python" -c 'import sys; print(sys.prefix)')
    export VIRTUAL_ENV=${VIRTUAL_ENV:-$prefix}
    arguments+=(--python "$python")
else
    arguments+=(--no-peer)
fi
nvidia-smi --query-gpu=name,uuid,driver_version,clocks.max.sm,clocks.sm,power.limit --format=csv 2>/dev/null
# Should the program itself hang, it is ended, and its parts' processes with it.
exec timeout --kill-after=3 $((limit + 4)) "$here/consort-device-check" "${arguments[@]}" "$@"
