"""PCCoT 1 and 2 and CODI 1 against their oracles, which use no cache, and misreadings."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from laconic.latent.rollout import LatentPrefix, LatentRollout, initial_latents, jacobi_update, run_latent_rollout
from laconic.latent.thought_vectors import Projection
from tests.models.fixtures import assert_close, noise, small
from tests.oracles import rollout_codi, rollout_pccot
from tests.oracles.compare import agree
from tests.oracles.rollout import Case, differentiated, prj

D, M = 8, 3
DECODER = small("llama")
MAP = Projection(D, 6, 0.0, torch.Generator().manual_seed(1)).double()


def read(vectors: list[Tensor], positions: list[int]) -> list[Tensor]:
    return list(DECODER(torch.stack(vectors)[None], position_ids=torch.tensor([positions])).hidden_states[0])


def case(num_iterations: int) -> Case:
    """Two questions padded on both sides and in the middle, and a projection all of whose weights matter."""
    mask = torch.tensor([[False, True, True, False, True], [False, False, True, True, False]])
    weights = {n: (noise(9, *p.shape) + (n == "norm.weight")).requires_grad_() for n, p in MAP.named_parameters()}
    question, bot, slot = (noise(i, *shape).requires_grad_() for i, shape in enumerate(((2, 5, D), (D,), (D,))))
    return Case(read, question, mask, bot, slot, M, num_iterations, weights)


def run_rollout(case: Case, schedule: str) -> LatentRollout:
    state = DECODER(case.question, attention_mask=case.live).cache
    return run_latent_rollout(
        DECODER,
        LatentPrefix(case.bot.expand(2, 1, D), state),
        case.slot,
        case.M,
        case.rounds if schedule == "jacobi" else None,
        project=lambda x: torch.func.functional_call(MAP, dict(case.weights), (x,)),
    )


def jacobi(case: Case) -> tuple[Tensor, Tensor]:
    got = run_rollout(case, "jacobi")
    return got.latents, got.hidden_states


def sequential(case: Case) -> tuple[Tensor, Tensor]:
    got = run_rollout(case, "sequential")
    return got.latents, got.hidden_states


@pytest.mark.medium
@pytest.mark.equation("pccot", "1")
def test_initial_latents_equation() -> None:
    agree(differentiated(jacobi), rollout_pccot.ORACLE["1"], rollout_pccot.MISREAD["1"], case(1), margin=1e-2)
    hidden, weights = noise(1, 2, 1 + M, D).requires_grad_(), case(1).weights
    got = initial_latents(hidden, lambda x: torch.func.functional_call(MAP, dict(weights), (x,)))
    assert_close(got, torch.stack([torch.stack([prj(hidden[b, m], weights) for m in range(M)]) for b in range(2)]))
    assert gradcheck(lambda x: initial_latents(x, MAP), hidden)


@pytest.mark.medium
@pytest.mark.equation("pccot", "2")
def test_jacobi_update_equation() -> None:
    agree(differentiated(jacobi), rollout_pccot.ORACLE["2"], rollout_pccot.MISREAD["2"], case(2), margin=1e-2)
    agree(
        differentiated(jacobi), rollout_pccot.ORACLE["2"], {}, case(3)
    )  # as many iterations as latents: the start does not matter
    z, hidden = noise(1, 2, M, D).requires_grad_(), noise(2, 2, M, D).requires_grad_()
    assert gradcheck(lambda z, hidden: jacobi_update(z, hidden, MAP), (z, hidden))


@pytest.mark.medium
@pytest.mark.equation("codi", "1")
def test_sequential_rollout_equation() -> None:
    agree(differentiated(sequential), rollout_codi.ORACLE["1"], rollout_codi.MISREAD["1"], case(0), margin=1e-2)

    def thoughts(bot: Tensor) -> Tensor:
        got = run_rollout(case(0)._replace(bot=bot), "sequential")
        return torch.einsum("bmd,d->b", got.latents, noise(3, D))

    assert gradcheck(thoughts, noise(1, D).requires_grad_())
