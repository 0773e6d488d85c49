"""mtp-research: train Multi-Token-Prediction heads on a frozen target and decode with them.

The repository keeps its Triton kernels in the top-level folder `kernels/`, which is imported as `mtp_research.kernels`.
"""

from pathlib import Path

# In a source tree or an editable install `kernels/` lies beside this package, not inside it. A top-level package called
# `kernels` would shadow Hugging Face's package of that name, so the folder is mounted here as a namespace sub-package.
_PACKAGE_DIR = Path(__file__).resolve().parent
if not (_PACKAGE_DIR / "kernels").is_dir():
    __path__.append(str(_PACKAGE_DIR.parent))
