#!/usr/bin/env bash
# Makes models/demo again: tokenizer and weights, mid-training on generated text, SFT on a mixture of expert and novice traces.
# 330 million tokens: under ten minutes with one GPU (DEVICE=cuda), about seven hours on two CPU cores.
set -euo pipefail
PYTHON=${PYTHON:-.venv/bin/python}; DEVICE=${DEVICE:-cpu}; OUT=${OUT:-models/demo}; BUILD=${BUILD:-build/demo-model}
MID_STEPS=${MID_STEPS:-1000}; SFT_STEPS=${SFT_STEPS:-9000}; EXPERT=${EXPERT:-0.44}; LR=${LR:-2e-3}
HIDDEN=${HIDDEN:-160}; LAYERS=${LAYERS:-4}; ROWS=${ROWS:-300000}
rollmill() { "$PYTHON" -m rollmill.cli "$@"; }
rollmill tasks export documents --num "$((ROWS / 3))" --seed 1 --levels 1,2 --out "$BUILD/text.jsonl"
rollmill tasks export traces --num "$ROWS" --seed 2 --levels 1,2 --expert-frac "$EXPERT" --out "$BUILD/traces.jsonl"
rollmill model new "$BUILD/fresh" --text "$BUILD/text.jsonl" --text "$BUILD/traces.jsonl" --hidden-size "$HIDDEN" --num-layers "$LAYERS"
rollmill midtrain "$BUILD/fresh" --data "$BUILD/text.jsonl" --out "$BUILD/mid" --steps "$MID_STEPS" --lr "$LR" --device "$DEVICE" --cache "$BUILD/cache" --resume
rollmill sft "$BUILD/mid" --data "$BUILD/traces.jsonl" --out "$OUT" --steps "$SFT_STEPS" --lr "$LR" --device "$DEVICE" --cache "$BUILD/cache" --resume
rm -rf "$OUT/stage"
