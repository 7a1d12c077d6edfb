"""What is refused before training: models, losses and optimizers around which no clipping or noise would help."""

from edpsgd.validation.losses import check_losses
from edpsgd.validation.models import check_model

__all__ = ["check_losses", "check_model"]
