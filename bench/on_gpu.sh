#!/usr/bin/env bash
# One step of an hour on a GPU (CONTRIBUTING.md): bench/on_gpu.sh STEP FOLDER [SECONDS] [ARGUMENTS ...]
#
# STEP is suite, memcheck, accuracy, or a suite of `cupyflash bench`. Its results go to FOLDER, its log to FOLDER/STEP.log; the
# last thing printed is a short table. After SECONDS it is interrupted; what was done until then is kept, and the same command
# goes on from there. ARGUMENTS are handed on, as in `bench/on_gpu.sh scores out 500 --only t5` or
# `bench/on_gpu.sh fp32 out 500 --family sm80 --dtype float32`.
set -uo pipefail
step=${1:?STEP is missing; it is suite, memcheck, accuracy, or one of cupyflash bench}
folder=${2:?FOLDER is missing}
seconds=${3:-540}
shift $(($# < 3 ? $# : 3))

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cd "$(dirname "$0")/.." || exit
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 MPLBACKEND=Agg XLA_PYTHON_CLIENT_PREALLOCATE=false
export CUPYFLASH_CONFIG_DIR=/dev/null # not with tiles that were tuned here
export PATH=$PATH:/usr/local/cuda/bin
python=$(command -v python3 || command -v python)
jobs=${JOBS:-$(env -u OMP_NUM_THREADS nproc)} # nproc would believe OMP_NUM_THREADS

limited() { # SIGNAL COMMAND ...
  timeout --signal="$1" --kill-after=30 "$seconds" "${@:2}"
}

suite() { # the tests that need a GPU; where a run of these sources was stopped or failed, only what it counts as failed
  local report=$folder/gpu_report.json left=() code
  [ ! -f "$report" ] || mapfile -t left < <("$python" - "$report" <<'END'
import json, sys
from cupyflash.gpu.source import sources_digest
report = json.load(open(sys.argv[1]))
tests = [name for name in report["failures"] if "::" in name]
if report["sources"] == sources_digest() and len(tests) == len(report["failures"]):
    print(*tests, sep="\n", end="\n" if tests else "")
END
  )
  # Each worker takes one of these (tests/conftest.py).
  export CUPYFLASH_TEST_GPUS=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd,)}
  limited INT "$python" -m pytest -q -n "$jobs" -m gpu --durations 30 --durations-min 5 --gpu-report "$report" "$@" \
    "${left[@]}"
  code=$?
  [ ! -f "$report" ] || "$python" - "$report" <<'END'
import json, sys
report = json.load(open(sys.argv[1]))
print(*(f"{report[name]} {name}" for name in ("passed", "failed", "skipped", "errors", "seconds")), sep=", ")
print(*report["failures"][:20], sep="\n")
END
  return $code
}

memcheck() { # TOOL=racecheck, initcheck, synccheck: others of compute-sanitizer; TOOL=none: without it, to fill the cache
  local name=${TOOL:-memcheck} tool=() logs=() pids=() code=0 part
  [ "$name" = none ] || tool=(compute-sanitizer --tool "$name" --error-exitcode 3)
  [ "$name" != memcheck ] || tool+=(--report-api-errors no)
  if [ "$name" = memcheck ] && [[ $(compute-sanitizer --help 2>&1) == *--destroy-on-device-error* ]]; then
    tool+=(--destroy-on-device-error kernel) # a kernel that fails does not take all that follow with it
  fi
  cat "$folder/$name"-*.log >>"$folder/$name.done" 2>/dev/null
  for part in $(seq "$jobs"); do
    logs+=("$folder/$name-$part.log")
    limited TERM "${tool[@]}" "$python" tests/memcheck.py --part "$part/$jobs" --after "$folder/$name.done" "$@" \
      >"${logs[-1]}" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
  grep -hE "WRONG|^=========  *(Invalid|Error|Race|Warning|Uninitialized|Barrier|Program hit)" "${logs[@]}" "$folder/$name.done" |
    sort | uniq -c | head -40
  grep -hE "^=========.*SUMMARY" "${logs[@]}" | sort | uniq -c
  awk '/: right, /{right++} /: left out: /{left++} /: WRONG: /{wrong++} /^part /{parts++}
    END {printf "%d right, %d left out, %d wrong; %d parts came to their end\n", right, left, wrong, parts}' "${logs[@]}"
  return $code
}

measure() { # SUITE ARGUMENTS ...
  local code file
  limited INT "$python" -m cupyflash.bench "$1" --out "$folder" --resume "${@:2}"
  code=$?
  file=$(ls -t "$folder"/*"$1"*.json 2>/dev/null | head -1)
  [ -z "$file" ] || "$python" - "$file" <<'END'
import json, sys
from cupyflash.bench import report
rows = json.load(open(sys.argv[1]))["rows"]
keys = [key for key in report.varying([row["problem"] for row in rows]) if key not in ("call", "error")]
print("\n" + "\t".join([*keys, "ours", "best peer", "", "vs best", "x alone" if rows[0].get("times_alone") else ""]))
for row in rows:
    if row["problem"].get("error", "largest") == "largest":
        peers = {name: x for name, x in row["peers"].items() if x is not None and name not in report.OWN}
        best = report.best(peers, row["unit"])
        name = next((name for name, x in peers.items() if x == best), "")
        shown = [*(row["problem"].get(key) for key in keys), row["ours"], best, name]
        print(*map(report.cell, shown), report.ratio_text(row["ratio_to_best"]).plain, row.get("times_alone", ""), sep="\t")
print(*report.summary(rows), sep="\n")
END
  return $code
}

{
  case $step in
    suite | memcheck) "$step" "$@" ;;
    accuracy) measure precision "$@" ;;
    *) measure "$step" "$@" ;;
  esac
} 2>&1 | tee "$folder/$step.log"
