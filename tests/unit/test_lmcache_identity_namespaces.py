"""Requests of one engine: adapters and tenants apart, and no client in another's place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from patches.lmcache_identity.namespaces import LONGEST_SALT, TAG, salt_for, tagged

allowed = st.text(st.characters(codec="utf-8"), max_size=200)
digests = st.from_regex(r"[0-9a-f]{16}", fullmatch=True)
adapters = st.none() | digests
settings = st.dictionaries(
    st.text(max_size=20) | st.text(max_size=20).map("lmcache.tag.{}".format) | st.just(TAG), st.text(max_size=80)
)


@given(allowed, adapters)
def test_the_salt_is_one_that_lmcache_takes(salt: str, adapter: str | None) -> None:
    found = salt_for(salt, adapter)
    assert len(found.encode()) <= LONGEST_SALT
    assert not set("@/\\\0") & set(found)


@given(st.tuples(allowed, adapters), st.tuples(allowed, adapters))
def test_two_tenants_or_adapters_never_have_one_salt(
    one: tuple[str, str | None], other: tuple[str, str | None]
) -> None:
    assert (salt_for(*one) == salt_for(*other)) == (one == other)


@given(allowed, digests, allowed)
def test_no_salt_reaches_an_adapters_namespace(salt: str, adapter: str, forged: str) -> None:
    """Not by what the keys of the adapter show either."""
    theirs = salt_for(salt, adapter)
    assert salt_for(theirs) != theirs
    assert salt_for(forged) != theirs
    assert salt_for(salt_for(theirs)) != theirs


def test_a_salt_that_keys_can_not_hold_is_told_by_its_digest() -> None:
    """LMCache raises on some characters; a file's name has 255 bytes, and LMCache's own limit counts characters."""
    bare = [salt_for(salt) for salt in ("a/b", "a@b", "é" * 128, "x" * 128)]
    assert all(found.startswith("salt~") for found in bare)
    assert len({*bare, salt_for("a"), salt_for("é" * 127)}) == len(bare) + 2


def test_a_tenants_own_salt_is_kept_because_quotas_go_by_it() -> None:
    assert salt_for("tenant-7") == "tenant-7"
    assert salt_for("") == ""
    assert salt_for("f" * 64) == "f" * 64
    assert salt_for("tenant-7", "0123456789abcdef") == "lora~0123456789abcdef~tenant-7"


@given(settings, allowed.filter(bool))
def test_a_client_can_neither_set_nor_shift_our_tag(configs: dict[str, str], salt: str) -> None:
    found = tagged(configs, salt)
    tags = [name for name in found if name.startswith("lmcache.tag.")]
    assert tags[0] == TAG
    assert found[TAG] == tagged({}, salt)[TAG]


@given(settings)
def test_without_a_salt_a_client_has_no_tag_of_ours(configs: dict[str, str]) -> None:
    assert TAG not in tagged(configs, "")


@given(settings, allowed)
def test_tags_are_free_of_what_separates_parts_of_keys_and_folders(configs: dict[str, str], salt: str) -> None:
    for name, value in tagged(configs, salt).items():
        if name.startswith("lmcache.tag."):
            assert not set("@%/\\\0") & set(name + value)


@given(settings, allowed)
def test_tagging_twice_changes_nothing(configs: dict[str, str], salt: str) -> None:
    """The scheduler asks for a request's hits again and again."""
    once = tagged(configs, salt)
    assert tagged(once, salt) == once
    assert list(tagged(once, salt)) == list(once)
