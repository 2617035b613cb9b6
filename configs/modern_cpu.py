# A small modern model of bytes, for a laptop without a GPU
# prepare text first: gptfit prepare TEXT.parquet --tokenizer bytes --out data/bytes
# 852.4k parameters as nanoGPT counts them (vocabulary 257), 5.70M FLOPs per token
# 16 rows x 128 tokens x 1 micro-step = 2,048 tokens per step
# 400 steps x 2,048 = 819.2k tokens, 1.0 per parameter

# model
arch = "modern"  # gptfit only; stock nanoGPT ignores it
n_layer = 4
n_head = 2
n_embd = 128  # head size 64
block_size = 128
dropout = 0.0
bias = False

# step
batch_size = 16
gradient_accumulation_steps = 1

# horizon
max_iters = 400

# learning rate
learning_rate = 0.0127
schedule = "wsd"  # gptfit only; stock nanoGPT ignores it
warmup_iters = 0  # 0.0 % of the run
lr_decay_iters = 400
decay_fraction = 0.4  # gptfit only; stock nanoGPT ignores it
min_lr = 0.0

# optimizer
optimizer = "muon"  # gptfit only; stock nanoGPT ignores it
weight_decay = 0.05
beta1 = 0.8
beta2 = 0.95

# data
dataset = "bytes"

# evaluation and files
out_dir = "out-modern-cpu"
eval_interval = 50
eval_iters = 20
log_interval = 10

# machine
device = "cpu"
