# GPT-2 774M on a card of 24 GB
# prepare the data first: gptfit prepare SOURCE --out data/openwebtext; before you start: gptfit plan THIS_FILE --gpu NAME
# plan for RTX 4090 24GB: 20.4 GiB, 23.7k tokens/s (20.1k to 27.2k), 7 d 14 h
# expected validation loss 2.71 (2.58 to 2.84)
# 772.3M parameters as nanoGPT counts them (vocabulary 50,304 unless the data says otherwise), 5.20B FLOPs per token
# 4 rows x 1024 tokens x 128 micro-steps = 524,288 tokens per step
# 29,459 steps x 524,288 = 15.4B tokens, 20.0 per parameter

# model
n_layer = 36
n_head = 20
n_embd = 1280  # head size 64
block_size = 1024
dropout = 0.0
bias = False

# step
batch_size = 4
gradient_accumulation_steps = 128

# horizon
max_iters = 29459

# learning rate
learning_rate = 2.5e-4
warmup_iters = 884  # 3.0 % of the run
lr_decay_iters = 29459
min_lr = 2.5e-5

# optimizer
weight_decay = 0.1
beta2 = 0.95

# data
dataset = 'openwebtext'

# evaluation and files
out_dir = 'out-gpt2-774m'
eval_interval = 736
eval_iters = 50

# tracking
wandb_run_name = 'gpt2-774m'
