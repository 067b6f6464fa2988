#!/bin/bash
# Duet under SLURM, on one node or many. From the repository, with options of sbatch before and of train.py after:
#
#     sbatch --nodes=4 --time=12:00:00 cluster/slurm.sh --config configs/stylegan2_256.yaml --run-dir runs/faces ...
#
# Two minutes before its time limit the run saves, exits with code 3, and the job requeues itself; after a lost node
# SLURM requeues it. Either way it resumes from the last checkpoint, so one submission trains to the end. A run that
# fails is not repeated; RUN_DIR/status.json has the reason. An evaluation in progress is finished first: the two
# minutes must be longer than an evaluation and a save (docs/scaling.md).
#
# All nodes must see the repository, the data and the run folder. Settings, as environment variables:
#   DUET_PYTHON  the interpreter (default: .venv/bin/python of the repository)
#   DUET_PROCS   processes per node (default: one per GPU; on CPUs give a number, and --device cpu to train.py);
#                train.py's own --gpus and --procs are refused here
#   DUET_PORT    of the rendezvous on the first node (default: from the job's number)
#SBATCH --job-name=duet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=duet-%j.log
set -euo pipefail

fail() {
    echo "error: $1" >&2
    exit 2
}

run_dir_of() { # the value of --run-dir among train.py's options; hyphens and underscores are the same there
    while (($#)); do
        case $1 in
        --run-dir=* | --run_dir=*) echo "${1#*=}" ;;
        --run-dir | --run_dir) echo "${2-}" ;;
        esac
        shift
    done
}

# On every node: one torchrun. It would die of USR1 and leave its processes behind, so it ignores the signal, and this
# shell passes it on to them. No restarts by torchrun: it would take a process that obeyed the signal for a failed one.
# shellcheck disable=SC2329 # what srun starts calls it
node() {
    local launcher
    trap 'hand_on "${launcher-}"' USR1
    trap 'kill -TERM "${launcher-}"' TERM
    (
        trap '' USR1
        exec "$DUET_PYTHON" -m torch.distributed.run --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$DUET_PROCS" \
            --max-restarts=0 --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$DUET_PORT" \
            --rdzv-conf="is_host=$((SLURM_NODEID == 0))" train.py "$@"
    ) &
    launcher=$!
    while kill -0 "$launcher" 2>/dev/null; do # `wait` also returns when a signal was handled
        wait "$launcher" || true
    done
    wait "$launcher"
}

# shellcheck disable=SC2329
hand_on() {
    local children
    # without this file (it depends on the kernel) there is nothing to signal: the processes must get it directly
    children=$(cat "/proc/$1/task/"*/children 2>/dev/null || true)
    # shellcheck disable=SC2086 # one word a process
    [ -z "$children" ] || kill -USR1 $children
}

status() { # a key of the run's status file, nothing where there is none
    "$DUET_PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$status_file" "$1" 2>/dev/null
}

[ -n "${SLURM_JOB_ID-}" ] || fail "this is a job for SLURM: sbatch cluster/slurm.sh --config FILE --run-dir DIR"
cd "${SLURM_SUBMIT_DIR:-.}"
[ -f train.py ] || fail "$PWD: no train.py here; call sbatch in the repository, or give it --chdir"
run_dir=$(run_dir_of "$@" | tail -n 1)
[ -n "$run_dir" ] || fail "--run-dir DIR is missing; its status.json says whether the job must be requeued"
status_file=$run_dir/status.json

export DUET_PYTHON=${DUET_PYTHON:-.venv/bin/python}
export DUET_PROCS=${DUET_PROCS:-gpu}
export DUET_PORT=${DUET_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun does not take it over from sbatch
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) # head would leave at once: SIGPIPE
export MASTER_ADDR

before=$(cat "$status_file" 2>/dev/null || true)
code=0
# a node whose processes have ended must not end the others while the first one still writes its status
srun --kill-on-bad-exit=0 --wait=120 bash -c "$(declare -f node hand_on); node \"\$@\"" node "$@" || code=$?

[ "$(cat "$status_file" 2>/dev/null || true)" != "$before" ] || exit "$((code ? code : 1))" # it never started
case $(status state) in
finished) exit 0 ;;
stopped)
    [ "$(status reason)" != SIGUSR1 ] || scontrol requeue "$SLURM_JOB_ID"
    exit "$(status exit_code)"
    ;;
*) exit "$((code ? code : 1))" ;;
esac
