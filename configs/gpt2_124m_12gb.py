# GPT-2 124M on a card of 12 GB
# prepare the data first: gptfit prepare SOURCE --out data/openwebtext; before you start: gptfit plan THIS_FILE --gpu NAME
# plan for RTX 4070 12GB: 9.4 GiB, 53.5k tokens/s (45.5k to 61.5k), 12 h 57 min
# expected validation loss 3.40 (3.27 to 3.53)
# 123.6M parameters as nanoGPT counts them (vocabulary 50,304 unless the data says otherwise), 854.8M FLOPs per token
# 16 rows x 1024 tokens x 32 micro-steps = 524,288 tokens per step
# 4,714 steps x 524,288 = 2.47B tokens, 20.0 per parameter

# model
n_layer = 12
n_head = 12
n_embd = 768  # head size 64
block_size = 1024
dropout = 0.0
bias = False

# step
batch_size = 16
gradient_accumulation_steps = 32

# horizon
max_iters = 4714

# learning rate
learning_rate = 6e-4
warmup_iters = 141  # 3.0 % of the run
lr_decay_iters = 4714
min_lr = 6e-5

# optimizer
weight_decay = 0.1
beta2 = 0.95

# data
dataset = 'openwebtext'

# evaluation and files
out_dir = 'out-gpt2-124m'
eval_interval = 117
eval_iters = 50

# tracking
wandb_run_name = 'gpt2-124m'
