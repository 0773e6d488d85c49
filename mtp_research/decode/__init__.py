"""The decode loop: scheduler, paged KV, verification, drafting, audit; needs no training stack."""
