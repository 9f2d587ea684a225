#!/usr/bin/env bash
# GRPO on the bundled reasoner:  bash run_reasoner.sh [MODE] [GPUS] [STEPS]
set -euo pipefail
MODE=${1:-lossless} # dense, lossless or lossy
GPUS=${2:-2}
STEPS=${3:-20}
here=$(cd "$(dirname "$0")" && pwd)
python3 "$here/grpo.py" --mode "$MODE" --gpus "$GPUS" --steps "$STEPS" --out "verl_${GPUS}_gpus_$MODE.json"
