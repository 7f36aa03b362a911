"""Block-sparse lists: from a mask, from and to PyTorch's BlockMask, transposed; and the interval bounds behind them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from tilewise.mods import BlockSparseTensors, create_block_sparse, from_block_mask
from tilewise.mods.interval import Interval, mask_bounds
from tilewise.mods.trace import trace

torch.set_num_threads(2)


def by_hand(fn, B, H, Sq, Sk, block_size, aux=()):
    """The block map from the whole mask, pair by pair."""
    bq, bk = block_size
    modifier, captures = trace(fn, "mask", list(aux) or None)
    mask = modifier.apply_mask(*map(torch.arange, (B, H, Sq, Sk)), captures)
    want = torch.zeros(B, H, -(-Sq // bq), -(-Sk // bk), dtype=torch.int8)
    for i in range(want.shape[2]):
        for j in range(want.shape[3]):
            block = mask[:, :, i * bq : (i + 1) * bq, j * bk : (j + 1) * bk].flatten(2)
            want[:, :, i, j] = block.any(-1).to(torch.int8) + block.all(-1)
    return want


IDS = torch.tensor([0] * 37 + [1] * 5 + [2] * 60 + [3] * 98, dtype=torch.int32)
SHUFFLED = torch.randperm(200, generator=torch.Generator().manual_seed(0)) // 40
PER_BATCH = torch.stack([IDS, SHUFFLED.int(), IDS.flip(0)])
WINDOWS = torch.tensor([3, 50])
ALLOWED = torch.rand(200, 200, generator=torch.Generator().manual_seed(1)) > 0.7
LENGTH = torch.tensor(70)

MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "bottom right": lambda b, h, q, k: q + 30 >= k,
    "window": lambda b, h, q, k: (q - k).abs() <= 20,
    "documents": lambda b, h, q, k: IDS[q] == IDS[k],
    "causal documents": lambda b, h, q, k: (IDS[q] == IDS[k]) & (k <= q),
    "unsorted documents": lambda b, h, q, k: SHUFFLED[q] == SHUFFLED[k],
    "documents per batch": lambda b, h, q, k: PER_BATCH[b, q] == PER_BATCH[b][k],
    "window per head": lambda b, h, q, k: (q >= k) & (q - k < WINDOWS[h]),
    "prefix": lambda b, h, q, k: torch.logical_or(k < LENGTH, q >= k),
    "dilated": lambda b, h, q, k: (q - k) % 7 == 0,
    "strided blocks": lambda b, h, q, k: (q // 32 + k // 16) % 3 != 1,
    "negative indices": lambda b, h, q, k: IDS[q - 200] > IDS[k - 100],
    "from a table of pairs": lambda b, h, q, k: ALLOWED[q, k],
    "float": lambda b, h, q, k: (q - k).float() * 0.5 > 3.0,
    "where": lambda b, h, q, k: torch.where(b == 0, q, k) < 90,
    "exclusive or": lambda b, h, q, k: (q < 64) ^ (k < 64),
    "not": lambda b, h, q, k: ~(q >= k),
    "everything": lambda b, h, q, k: q >= 0,
    "nothing": lambda b, h, q, k: q < 0,
    "even batches": lambda b, h, q, k: (b % 2 == 0) & (q >= 0),
    "narrow integers": lambda b, h, q, k: (q.to(torch.int8) * 2) >= k.to(torch.int8),
}


@pytest.mark.parametrize("block_size", [(32, 16), (128, 128), (7, 50)])
@pytest.mark.parametrize("fn", MASKS.values(), ids=MASKS.keys())
def test_lists_equal_the_mask_looked_at_pair_by_pair(fn, block_size):
    sizes = (3, 2, 190, 150)
    lists = create_block_sparse(fn, *sizes, block_size=block_size)
    want = by_hand(fn, *sizes, block_size)
    assert torch.equal(lists.dense().expand_as(want), want)
    assert lists.block_size == block_size
    for t in lists.tensors().values():
        assert t.dtype == torch.int32 and t.shape[0] in (1, 3) and t.shape[1] in (1, 2)


def test_axes_the_mask_does_not_depend_on_have_size_1():
    shapes = {name: create_block_sparse(MASKS[name], 3, 2, 64, 64).mask_block_cnt.shape[:2] for name in MASKS}
    assert shapes["causal"] == (1, 1) and shapes["documents"] == (1, 1)
    assert shapes["documents per batch"] == (3, 1) and shapes["window per head"] == (1, 2)


@pytest.mark.parametrize("name", ["causal", "window", "documents", "causal documents", "documents per batch", "prefix"])
def test_only_boundary_blocks_are_looked_at(name, monkeypatch):
    looked = []
    modifier, _ = trace(MASKS[name], "mask")
    tile = modifier.tile
    monkeypatch.setitem(modifier.__dict__, "tile", lambda *a: looked.append(tile(*a)) or looked[-1])
    lists = create_block_sparse(MASKS[name], 1, 1, 200, 200, block_size=(4, 4))
    pairs = sum(t.numel() for t in looked)
    partial = int(lists.mask_block_cnt.sum())
    assert pairs <= 1 + 16 * (partial + 20), (pairs, partial)


def test_long_sequences_take_little_memory_and_time():
    ids = torch.arange(2**17) // 1000
    modifier, captures = trace(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), "mask")
    with torch.profiler.profile(profile_memory=True) as profile:
        lists = create_block_sparse(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), 1, 1, 2**17, 2**17)
    largest = max(e.self_cpu_memory_usage for e in profile.events())
    assert largest < 2**30  # 2**34 pairs
    assert lists.mask_block_cnt.shape == (1, 1, 1024)
    for i in (0, 7, 500, 1023):
        visible = {n for n, _ in lists.visible_blocks(0, 0)[i]}
        first = int(ids[i * 128]) * 1000 // 128
        assert visible == set(range(first, i + 1))


def test_tails_that_are_otherwise_visible_are_full():
    lists = create_block_sparse(lambda b, h, q, k: q >= 0, 1, 1, 130, 250, block_size=(128, 128))
    assert lists.dense().tolist() == [[[[2, 2], [2, 2]]]]


@pytest.mark.parametrize("sizes", [(0, 2, 8, 8), (1, 0, 8, 8), (1, 1, 0, 8), (1, 1, 8, 0)])
def test_empty_sizes(sizes):
    lists = create_block_sparse(MASKS["causal"], *sizes, block_size=(4, 4))
    nq, nk = -(-sizes[2] // 4), -(-sizes[3] // 4)
    assert lists.mask_block_idx.shape == (*sizes[:2], nq, nk)
    assert lists.transpose().mask_block_idx.shape == (*sizes[:2], nk, nq)


def test_aux_tensors_reach_the_mask():
    def fn(b, h, q, k, aux):
        return aux[0][q] == aux[0][k]

    lists = create_block_sparse(fn, 1, 1, 200, 200, block_size=(16, 16), aux_tensors=[IDS])
    assert torch.equal(lists.dense(), by_hand(MASKS["documents"], 1, 1, 200, 200, (16, 16)))


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((1, 1, 8, -8), ValueError, "Sk: expected a size >= 0, got -8"),
        ((1, 1, 8.0, 8), TypeError, "Sq: expected an int, got 8.0"),
        ((True, 1, 8, 8), TypeError, "B: expected an int, got True"),
        ((1, 1, 8, 8, (0, 4)), ValueError, "block_size: expected a size of at least 1, got 0"),
    ],
)
def test_wrong_sizes(arguments, error, message):
    with pytest.raises(error, match=message):
        create_block_sparse(MASKS["causal"], *arguments)


# ---- lists as such
def lists_of(partial, full, nk, shape=(1, 1)):
    """Lists with unsorted entries and garbage beyond the counts."""

    def pack(rows):
        cnt = torch.tensor([len(r) for r in rows], dtype=torch.int32)
        idx = torch.full((len(rows), nk), 10**6, dtype=torch.int32)
        for i, r in enumerate(rows):
            idx[i, : len(r)] = torch.tensor(r, dtype=torch.int32)
        return cnt.expand(*shape, -1), idx.expand(*shape, -1, -1)

    return BlockSparseTensors(*pack(partial), *pack(full), block_size=(64, 32))


def test_unsorted_lists_with_empty_rows_and_columns():
    lists = lists_of([[3, 0], [], [1]], [[2], [], [3, 1]], nk=5)
    assert lists.dense().tolist() == [[[[1, 0, 2, 1, 0], [0] * 5, [0, 2, 0, 2, 0]]]]
    assert lists.visible_blocks(0, 0) == [[(0, False), (2, True), (3, False)], [], [(1, True), (3, True)]]
    back = lists.transpose()
    assert back.block_size == (32, 64)
    assert back.mask_block_cnt.tolist() == [[[1, 0, 0, 1, 0]]]
    assert back.full_block_cnt.tolist() == [[[0, 1, 1, 1, 0]]]
    assert back.full_block_idx[0, 0, 3, 0] == 2 and back.mask_block_idx[0, 0, 3, 0] == 0
    assert torch.equal(back.transpose().dense(), lists.dense())


def test_broadcast_batch_and_head():
    lists = create_block_sparse(MASKS["documents per batch"], 3, 2, 200, 200, block_size=(16, 16))
    assert lists.mask_block_cnt.shape[:2] == (3, 1)
    assert lists.visible_blocks(2, 0) == lists.visible_blocks(2, 1) != lists.visible_blocks(1, 1)
    mixed = lists._replace(
        **{k: getattr(lists_of([[0]] * 13, [[1]] * 13, 13), k) for k in ("full_block_cnt", "full_block_idx")}
    )
    assert mixed.dense().shape == (3, 1, 13, 13)
    assert all((1, True) in row for row in mixed.visible_blocks(2, 1))


def test_without_full_lists():
    lists = lists_of([[1], [0, 2]], [[], []], nk=3)._replace(full_block_cnt=None, full_block_idx=None)
    assert list(lists.tensors()) == ["mask_block_cnt", "mask_block_idx"]
    assert lists.dense().tolist() == [[[[0, 1, 0], [1, 0, 1]]]]
    assert lists.transpose().visible_blocks(0, 0) == [[(1, False)], [(0, False)], [(1, False)]]


@pytest.mark.parametrize("name", ["causal", "documents", "documents per batch", "window per head"])
def test_from_and_to_the_block_mask_of_pytorch(name):
    theirs = create_block_mask(MASKS[name], 3, 2, 200, 200, device="cpu", BLOCK_SIZE=(32, 64))
    ours = from_block_mask(theirs)
    assert ours.block_size == (32, 64)
    assert torch.equal((ours.dense() > 0).int(), theirs.to_dense())
    want = by_hand(MASKS[name], 3, 2, 200, 200, (32, 64))
    assert torch.equal((ours.dense() > 0), want > 0)
    back = ours.to_block_mask(MASKS[name], seq_lengths=(200, 200))
    assert torch.equal(back.to_dense(), theirs.to_dense())
    assert torch.equal(back.full_kv_num_blocks, theirs.full_kv_num_blocks) and back.seq_lengths == (200, 200)
    with pytest.raises(TypeError, match="block_mask: expected a torch.nn.attention.flex_attention.BlockMask, got None"):
        from_block_mask(None)


# ---- interval bounds
_LEAF = st.sampled_from(["q", "k", "b", "h", "ids", "perm", "2", "-3", "5"])
_TREE = st.recursive(
    _LEAF,
    lambda inner: st.tuples(
        st.sampled_from(["+", "-", "*", "//", "%", "min", "max", "abs", "neg", "where", "at"]), inner, inner, inner
    ),
    max_leaves=6,
)
_COMPARISON = st.tuples(st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), _TREE, _TREE)
_LOGIC = st.recursive(
    _COMPARISON, lambda inner: st.tuples(st.sampled_from(["and", "or", "xor", "not"]), inner, inner), max_leaves=3
)


def number(tree, at):
    if isinstance(tree, str):
        return at[tree] if tree in at else torch.tensor(int(tree))
    op, x, y, z = tree
    x, y = number(x, at), number(y, at)
    if op == "where":
        return torch.where(x > y, number(z, at), x)
    if op == "at":
        return SHUFFLED[x % 200]
    divisor = torch.where(y == 0, 1, y)
    return {
        "+": lambda: x + y,
        "-": lambda: x - y,
        "*": lambda: (x % 1000) * (y % 1000),
        "//": lambda: x // divisor,
        "%": lambda: x % divisor,
        "min": lambda: torch.minimum(x, y),
        "max": lambda: torch.maximum(x, y),
        "abs": lambda: x.abs(),
        "neg": lambda: -x,
    }[op]()


def truth(tree, at):
    op, x, y = tree
    if op in ("and", "or", "xor", "not"):
        x, y = truth(x, at), truth(y, at)
        return {"and": x & y, "or": torch.logical_or(x, y), "xor": x ^ y, "not": ~x}[op]
    x, y = number(x, at), number(y, at)
    return {"<": x < y, "<=": x <= y, ">": x > y, ">=": x >= y, "==": x == y, "!=": x != y}[op]


@settings(max_examples=150, deadline=None)
@given(_LOGIC)
def test_bounds_hold_for_random_masks(tree):
    def fn(b, h, q, k):
        return truth(tree, {"b": b, "h": h, "q": q, "k": k, "ids": IDS[q], "perm": SHUFFLED[k]})

    B, H, S, bq, bk = 2, 2, 60, 10, 6
    modifier, captures = trace(fn, "mask")
    first_q, first_k = torch.arange(0, S, bq).view(1, 1, -1, 1), torch.arange(0, S, bk).view(1, 1, 1, -1)
    bounds = mask_bounds(
        modifier,
        torch.arange(B).view(-1, 1, 1, 1),
        torch.arange(H).view(1, -1, 1, 1),
        Interval(first_q, first_q + bq - 1),
        Interval(first_k, first_k + bk - 1),
        captures,
    )
    assert bounds is not None  # integers have rules for all of these
    want = by_hand(fn, B, H, S, S, (bq, bk))
    assert not (bounds.lo & (want != 2)).any(), "called full, is not"
    assert not (~bounds.hi & (want != 0)).any(), "called absent, is not"
