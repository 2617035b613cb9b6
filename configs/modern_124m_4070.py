# GPT-2 124M with the modern recipe on one RTX 4070 12 GB
# prepare FineWeb first: gptfit prepare ... --out data/fineweb
# the recipe: docs/recipe.md; before you start: gptfit plan THIS_FILE --gpu 4070
# 162.2M parameters as nanoGPT counts them (vocabulary 50,304 unless the data says otherwise), 854.7M FLOPs per token
# 16 rows x 1024 tokens x 32 micro-steps = 524,288 tokens per step
# 3,229 steps x 524,288 = 1.69B tokens, 10.4 per parameter

# model
arch = "modern"  # gptfit only; stock nanoGPT ignores it
n_layer = 12
n_head = 12
n_embd = 768  # head size 64
block_size = 1024
dropout = 0.0
bias = False

# step
batch_size = 16
gradient_accumulation_steps = 40  # not used: tokens_per_step makes it 32
tokens_per_step = 524288  # gptfit only; stock nanoGPT ignores it

# horizon
max_iters = 3229

# learning rate
learning_rate = 0.02
schedule = "wsd"  # gptfit only; stock nanoGPT ignores it
warmup_iters = 0  # 0.0 % of the run
lr_decay_iters = 3229
decay_fraction = 0.6  # gptfit only; stock nanoGPT ignores it
min_lr = 0.0

# optimizer
optimizer = "muon"  # gptfit only; stock nanoGPT ignores it
weight_decay = 0.05
beta1 = 0.8
beta2 = 0.95

# data
dataset = "fineweb"

# evaluation and files
out_dir = "out-modern-124m"
eval_interval = 250
eval_iters = 50

# machine
chunked_loss = True  # gptfit only; stock nanoGPT ignores it
