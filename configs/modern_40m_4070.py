# 12 x 384 with the modern recipe on one RTX 4070 12 GB
# the recipe: docs/recipe.md; before you start: gptfit plan THIS_FILE --gpu 4070
# 59.9M parameters as nanoGPT counts them (vocabulary 50,304 unless the data says otherwise), 299.9M FLOPs per token
# 32 rows x 1024 tokens x 4 micro-steps = 131,072 tokens per step
# 4,239 steps x 131,072 = 555.6M tokens, 9.3 per parameter

# model
arch = "modern"  # gptfit only; stock nanoGPT ignores it
n_layer = 12
n_head = 6
n_embd = 384  # head size 64
block_size = 1024
dropout = 0.0
bias = False

# step
batch_size = 32
gradient_accumulation_steps = 40  # not used: tokens_per_step makes it 4
tokens_per_step = 131072  # gptfit only; stock nanoGPT ignores it

# horizon
max_iters = 4239

# learning rate
learning_rate = 0.0179
schedule = "wsd"  # gptfit only; stock nanoGPT ignores it
warmup_iters = 0  # 0.0 % of the run
lr_decay_iters = 4239
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
out_dir = "out-modern-40m"
eval_interval = 250
eval_iters = 50

# machine
chunked_loss = True  # gptfit only; stock nanoGPT ignores it
