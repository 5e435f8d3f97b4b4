"""Distillation of the base model that reads the text into the model that reads summary vectors in its place.

Knowledge distillation (arXiv:1503.02531) with a context that only the teacher reads, as in context distillation
(arXiv:2209.15189).

Symbols: p, q distributions over the next token of teacher and student; tau their temperature. N tokens, V vocabulary.
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from laconic.models.attention import accumulation_dtype


def distillation_loss(
    student_logits: Float[Tensor, "N V"], teacher_logits: Float[Tensor, "N V"], temperature: float = 1.0
) -> Float[Tensor, " N"]:
    """Eq. VL30: tau^2 KL(p || q) of each token, in nats; p and q are softmaxes of the logits divided by tau.

    No gradient flows to the teacher. The factor tau^2 keeps the size of the gradient (arXiv:1503.02531, section 2).
    """
    dtype = accumulation_dtype(student_logits.dtype)
    log_q = F.log_softmax(student_logits.to(dtype) / temperature, -1)
    log_p = F.log_softmax(teacher_logits.detach().to(dtype) / temperature, -1)
    return temperature**2 * F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
