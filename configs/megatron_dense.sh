#!/usr/bin/env bash
# A dense GPT of 8 billion parameters on the 8 GPUs of one host, its checkpoints compressed. Megatron-LM 0.18 and later, unmodified.
#
#   MEGATRON=Megatron-LM DATA=corpus_text_document TOKENIZER=tokenizer_folder CHECKPOINTS=checkpoints ./megatron_dense.sh [arguments]
set -euo pipefail

MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
)
PARALLEL=(
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
TRAINING=(
    --bf16 --micro-batch-size 1 --global-batch-size 128 --train-iters 100000 --clip-grad 1.0 --weight-decay 0.1
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 1000 --adam-beta1 0.9 --adam-beta2 0.95
    --log-interval 10 --eval-interval 1000 --eval-iters 10
)
TEXT=(--data-path "$DATA" --split 99,1,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
SAVING=(
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500 --ckpt-format torch_dist
    --async-save --use-persistent-ckpt-worker --async-strategy mcore  # both are needed; 0.16 has no --async-strategy
    --nvcomp-checkpoint  # the only argument of ours; deflate, unless a codec follows
)

export CUDA_DEVICE_MAX_CONNECTIONS=1
exec torchrun --nproc-per-node 8 "$MEGATRON/pretrain_gpt.py" "${MODEL[@]}" "${PARALLEL[@]}" "${TRAINING[@]}" "${TEXT[@]}" \
    "${SAVING[@]}" "$@"
