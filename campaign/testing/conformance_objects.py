"""What every ObjectStore must do; run it against each implementation.

::

    class TestMine(ObjectsConformance):
        @pytest.fixture
        def objects(self):
            return MyObjects(...)      # an empty one
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from campaign.errors import StoreError
from campaign.store.objects import ObjectStore


class ObjectsConformance:
    """Inherit, and provide the fixture `objects`."""

    @pytest.fixture
    def objects(self) -> ObjectStore:
        raise NotImplementedError

    def test_it_is_an_object_store(self, objects: ObjectStore) -> None:
        assert isinstance(objects, ObjectStore)
        assert objects.keys() == []
        assert objects.get("a/b") is None
        assert not objects.has("a/b")

    def test_bytes_come_back_as_they_were(self, objects: ObjectStore) -> None:
        for key, data in {"e": b"", "a/b.json": b'{"x": 1}\n', "a/c=1@2~3": bytes(range(256)) * 300}.items():
            objects.put(key, data)
            assert objects.get(key) == data
            assert objects.has(key)
        assert objects.keys() == ["a/b.json", "a/c=1@2~3", "e"]
        assert objects.keys("a/") == ["a/b.json", "a/c=1@2~3"]

    def test_putting_again_changes_nothing(self, objects: ObjectStore) -> None:
        """A put whose answer was lost may be repeated; another object under the same key is refused."""
        objects.put("k", b"one")
        objects.put("k", b"one")
        with pytest.raises(StoreError, match="taken"):
            objects.put("k", b"two")
        assert objects.get("k") == b"one"

    def test_of_many_that_race_for_a_key_one_wins(self, objects: ObjectStore) -> None:
        def put(n: int) -> bool:
            try:
                objects.put("race", f"{n}".encode())
            except StoreError:
                return False
            return True

        objects.has("race")
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(put, range(8)))
        assert won.count(True) == 1
        assert objects.get("race") == f"{won.index(True)}".encode()

    @pytest.mark.parametrize("key", ["", "/a", "a/", "../a", "a/../b", "a//b", "a b", "a\nb", "./a", "é"])
    def test_a_key_cannot_leave_the_store(self, objects: ObjectStore, key: str) -> None:
        for ask in (lambda: objects.put(key, b""), lambda: objects.get(key), lambda: objects.has(key)):
            with pytest.raises(StoreError, match="not a key"):
                ask()
