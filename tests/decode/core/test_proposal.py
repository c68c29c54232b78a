"""Token trees that drafters put together."""

import torch

from decode.draft import Draft


def paths(draft: Draft) -> set[tuple[int, ...]]:
    return {tuple(draft.text_before([], node)) for node in range(len(draft))}


def test_a_branch_joins_a_tree_where_they_agree_and_no_node_twice() -> None:
    tree = Draft.tree([5, 6, 7, 8], [-1, -1, 0, 2])
    assert paths(tree.with_branch([5, 7, 9])) == paths(tree) | {(5, 7, 9)}
    assert paths(tree.with_branch([6, 7])) == paths(tree) | {(6, 7)}
    assert paths(tree.with_branch([4, 5, 7])) == paths(tree) | {(4,), (4, 5), (4, 5, 7)}
    assert paths(tree.with_branch([5, 7, 8, 8])) == paths(tree) | {(5, 7, 8, 8)}
    for branch in ([5, 7, 9], [6, 7], [4, 5, 7], [5, 7, 8, 8], [3]):
        joined = tree.with_branch(branch)
        assert len(joined) == len(paths(joined)) == len(joined.tokens)
        assert all(parent < node for node, parent in enumerate(joined.parents))
        assert joined.parents[:4] == tree.parents  # the nodes of the tree keep their places
        assert torch.equal(joined.tokens[:4], tree.tokens)


def test_a_branch_that_the_tree_holds_changes_nothing() -> None:
    tree = Draft.tree([5, 6, 7], [-1, -1, 0])
    assert tree.with_branch([5, 7]) is tree
    assert tree.with_branch([]) is tree
    assert paths(Draft.empty().with_branch([5, 7])) == {(5,), (5, 7)}
