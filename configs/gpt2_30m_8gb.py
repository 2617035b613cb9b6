# GPT-2 30M on a card of 8 GB
# prepare the data first: gptfit prepare SOURCE --out data/openwebtext; before you start: gptfit plan THIS_FILE --gpu NAME
# plan for RTX 4060 8GB: 3.9 GiB, 95.7k tokens/s (81.4k to 110.1k), 1 h 48 min
# expected validation loss 4.34 (3.79 to 4.59)
# 29.9M parameters as nanoGPT counts them (vocabulary 50,304 unless the data says otherwise), 207.9M FLOPs per token
# 16 rows x 1024 tokens x 16 micro-steps = 262,144 tokens per step
# 2,284 steps x 262,144 = 598.7M tokens, 20.0 per parameter

# model
n_layer = 6
n_head = 6
n_embd = 384  # head size 64
block_size = 1024
dropout = 0.0
bias = False

# step
batch_size = 16
gradient_accumulation_steps = 16

# horizon
max_iters = 2284

# learning rate
learning_rate = 9.4e-4
warmup_iters = 69  # 3.0 % of the run
lr_decay_iters = 2284
min_lr = 9.4e-5

# optimizer
weight_decay = 0.1
beta2 = 0.95

# data
dataset = 'openwebtext'

# evaluation and files
out_dir = 'out-gpt2-30m'
eval_interval = 57
eval_iters = 50

# tracking
wandb_run_name = 'gpt2-30m'
