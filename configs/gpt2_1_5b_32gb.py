# GPT-2 1.5B on a card of 32 GB
# prepare the data first: gptfit prepare SOURCE --out data/openwebtext; before you start: gptfit plan THIS_FILE --gpu NAME
# plan for RTX 5090 32GB: 26.3 GiB and 11.6 GiB of main memory, 16.2k tokens/s (13.8k to 18.7k), 22 d 5 h
# expected validation loss 2.57 (2.44 to 2.70)
# 1.56B parameters as nanoGPT counts them (vocabulary 50,304 unless the data says otherwise), 10.3B FLOPs per token
# 4 rows x 1024 tokens x 256 micro-steps = 1,048,576 tokens per step
# 29,663 steps x 1,048,576 = 31.1B tokens, 20.0 per parameter

# model
n_layer = 48
n_head = 25
n_embd = 1600  # head size 64
block_size = 1024
dropout = 0.0
bias = False

# step
batch_size = 4
gradient_accumulation_steps = 256

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
