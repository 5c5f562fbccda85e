#!/usr/bin/env bash
# A mixture of 16 experts, 2 of them on each of the 8 GPUs of one host, its checkpoints compressed. Megatron-LM 0.18 and later, unmodified.
#
#   MEGATRON=Megatron-LM DATA=corpus_text_document TOKENIZER=tokenizer_folder CHECKPOINTS=checkpoints ./megatron_moe.sh [arguments]
set -euo pipefail

MODEL=(
    --num-layers 24 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --group-query-attention --num-query-groups 8
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
)
EXPERTS=(
    --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 4096 --moe-grouped-gemm
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall
)
PARALLEL=(
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --expert-model-parallel-size 8
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
    --dist-ckpt-optim-fully-reshardable  # so that it also loads at another expert or tensor parallelism
    --async-save --use-persistent-ckpt-worker --async-strategy mcore  # both are needed; 0.16 has no --async-strategy
    --nvcomp-checkpoint ans --nvcomp-checkpoint-gpu-memory 268435456  # the fastest codec on NVIDIA GPUs; half of its usual work memory
)

export CUDA_DEVICE_MAX_CONNECTIONS=1
exec torchrun --nproc-per-node 8 "$MEGATRON/pretrain_gpt.py" "${MODEL[@]}" "${EXPERTS[@]}" "${PARALLEL[@]}" "${TRAINING[@]}" "${TEXT[@]}" \
    "${SAVING[@]}" "$@"
