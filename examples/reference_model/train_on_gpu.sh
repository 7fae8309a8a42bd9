#!/usr/bin/env bash
# One training run on a machine without network. Usage, from anywhere:
#   train_on_gpu.sh CORPUS OUT [MINUTES [flags of examples.reference_model.train ...]]
# CORPUS holds train.txt.gz (examples.reference_model.corpus) and, if it was made beforehand, tokenizer/.
# OUT gets model.tar.NN (12 MiB each), log.jsonl and curve.png. To go on from an earlier OUT, copy it somewhere and add
#   --resume COPY
# A run that another will follow should end with --decay 0 (the learning rate stays up), the last one with --decay 0.3.
set -euo pipefail
corpus=$(realpath "$1") out=$(realpath "$2") minutes=${3:-8.5}
shift $(($# < 3 ? $# : 3))
cd "$(dirname "$0")/../.."
tokenizer=()
if [[ -d $corpus/tokenizer ]]; then
    tokenizer=(--tokenizer "$corpus/tokenizer")
fi
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
exec python3 -m examples.reference_model.train --corpus "$corpus/train.txt.gz" "${tokenizer[@]}" \
    --out "$out" --minutes "$minutes" "$@"
