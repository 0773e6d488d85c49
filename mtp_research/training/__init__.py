"""Training: the pretraining of small targets and the training of MTP modules on a frozen target."""
