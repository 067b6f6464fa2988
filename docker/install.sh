#!/bin/sh
# Install the lock file into a new virtual environment: install.sh LOCK VENV, with TORCH_INDEX_URL set for CPU builds.
set -eu
lock=$1
venv=$2
index=${TORCH_INDEX_URL:-}

python3 -m venv "$venv"
if [ -n "$index" ]; then
    # A CPU-only wheel is named like 2.1.0+cpu, which satisfies ==2.1.0 and ranks above the registry's plain 2.1.0,
    # so torch and torchvision both come from the extra index. They must: a mixed pair does not import.
    grep -Ev '^(nvidia-|cuda-|triton==)' "$lock" >"$lock.cpu"
    "$venv/bin/pip" install --no-cache-dir --extra-index-url "$index" -r "$lock.cpu"
    expected=cpu
else
    "$venv/bin/pip" install --no-cache-dir -r "$lock"
    expected=any
fi

# The pair must fit together, and a CPU image must not have fallen back to the CUDA build because an index lacked one.
"$venv/bin/python" - "$expected" <<'PYTHON'
import sys

import torch
import torchvision

torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
if sys.argv[1] == "cpu" and torch.version.cuda:
    sys.exit(f"error: TORCH_INDEX_URL has no CPU build of torch {torch.__version__}; give an index that has, or none")
print(f"torch {torch.__version__} and torchvision {torchvision.__version__} fit together")
PYTHON
