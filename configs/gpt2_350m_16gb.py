# GPT-2 350M on a card of 16 GB
# prepare the data first: gptfit prepare SOURCE --out data/openwebtext; before you start: gptfit plan THIS_FILE --gpu NAME
# plan for RTX 4070 Ti SUPER 16GB: 13.8 GiB, 28.2k tokens/s (24.0k to 32.4k), 2 d 22 h
# expected validation loss 2.95 (2.82 to 3.08)
# 353.6M parameters as nanoGPT counts them (vocabulary 50,304 unless the data says otherwise), 2.42B FLOPs per token
# 8 rows x 1024 tokens x 64 micro-steps = 524,288 tokens per step
# 13,486 steps x 524,288 = 7.07B tokens, 20.0 per parameter

# model
n_layer = 24
n_head = 16
n_embd = 1024  # head size 64
block_size = 1024
dropout = 0.0
bias = False

# step
batch_size = 8
gradient_accumulation_steps = 64

# horizon
max_iters = 13486

# learning rate
learning_rate = 3e-4
warmup_iters = 405  # 3.0 % of the run
lr_decay_iters = 13486
min_lr = 3e-5

# optimizer
weight_decay = 0.1
beta2 = 0.95

# data
dataset = 'openwebtext'

# evaluation and files
out_dir = 'out-gpt2-350m'
eval_interval = 337
eval_iters = 50

# tracking
wandb_run_name = 'gpt2-350m'

# machine
chunked_loss = True  # gptfit only; stock nanoGPT ignores it
