#!/usr/bin/env bash
# Checks Consort on this machine's first GPU: `device-check.sh [--only PART,..] [--out DIR] [--size small]`. Ends within
# 4.5 minutes, prints a table last, and leaves report.json and report.md in DIR (else in $OUT, else in
# ./device-check-report). Needs the driver; takes cuBLASLt and, for comparisons, PyTorch from the first Python here that
# has it.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
limit=${CONSORT_DEVICE_CHECK_SECONDS:-264}
out=${OUT:-device-check-report}
wanted=()
while [ $# -gt 0 ]; do
    case $1 in
    --out) out=${2:?--out wants a folder} && shift ;;
    --out=*) out=${1#--out=} ;;
    *) wanted+=("$1") ;;
    esac
    shift
done

# The first interpreter that has PyTorch for CUDA; the check does without where there is none. Loading PyTorch would
# take too long: its version file says what it is for.
python=
for candidate in ${CONSORT_DEVICE_CHECK_PYTHON:-} python3 /opt/*/.venv/bin/python3 /opt/*/bin/python3 /usr/bin/python3; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    if timeout 10 "$candidate" - 2>/dev/null <<'PYTHON'; then
import importlib.util, pathlib, sys
found = importlib.util.find_spec("torch")
version = pathlib.Path(found.origin).with_name("version.py").read_text() if found else ""
sys.exit("+cpu" in version or not found)
PYTHON
        python=$candidate
        break
    fi
done

# Containers mount the driver's libraries where the loader need not look.
for folder in /usr/local/nvidia/lib64 /usr/local/nvidia/lib; do
    [ -e "$folder/libcuda.so.1" ] && export LD_LIBRARY_PATH="$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" && break
done

if [ -n "$python" ]; then
    # Its wheels have the libraries that the driver does not bring.
    prefix=$("$python" -c 'import sys; print(sys.prefix)')
    export VIRTUAL_ENV=${VIRTUAL_ENV:-$prefix}
    wanted+=(--python "$python")
else
    wanted+=(--no-peer)
fi
timeout 10 nvidia-smi --query-gpu=name,uuid,driver_version,clocks.max.sm,clocks.sm,power.limit --format=csv 2>/dev/null

# What was spent here counts. Should the program itself hang, it is ended, and its parts with it: what it had found is
# printed all the same.
left=$((limit - SECONDS))
timeout --kill-after=2 $((left + 2)) "$here/consort-device-check" run --limit "$left" --out "$out" "${wanted[@]}"
status=$?
[ "$status" -lt 124 ] || cat "$out/report.md"
exit "$status"
