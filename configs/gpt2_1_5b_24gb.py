# GPT-2 1.5B on a card of 24 GB
# prepare the data first: gptfit prepare SOURCE --out data/openwebtext; before you start: gptfit plan THIS_FILE --gpu NAME
# plan for RTX 4090 24GB: 20.7 GiB and 11.6 GiB of main memory, 11.0k tokens/s (9.37k to 12.7k), 32 d 16 h
# expected validation loss 2.57 (2.44 to 2.70)
# 1.56B parameters as nanoGPT counts them (vocabulary 50,304 unless the data says otherwise), 10.3B FLOPs per token
# 2 rows x 1024 tokens x 512 micro-steps = 1,048,576 tokens per step
# 29,663 steps x 1,048,576 = 31.1B tokens, 20.0 per parameter

# model
n_layer = 48
n_head = 25
n_embd = 1600  # head size 64
block_size = 1024
dropout = 0.0
bias = False

# step
batch_size = 2
gradient_accumulation_steps = 512

# horizon
max_iters = 29663

# learning rate
learning_rate = 1.9e-4
warmup_iters = 890  # 3.0 % of the run
lr_decay_iters = 29663
min_lr = 1.9e-5

# optimizer
weight_decay = 0.1
beta2 = 0.95

# data
dataset = 'openwebtext'

# evaluation and files
out_dir = 'out-gpt2-1.5b'
eval_interval = 741
eval_iters = 50

# tracking
wandb_run_name = 'gpt2-1.5b'

# machine
optimizer_device = 'cpu'  # gptfit only; stock nanoGPT ignores it
