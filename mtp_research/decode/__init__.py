"""The speculative decode loop: scheduler, paged KV, verification, drafting, audit. Imports neither hydra nor wandb."""
