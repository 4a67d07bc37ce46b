"""What operators and accidents do to an etcd: with TLS for both ends, users, and a small quota."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from kvstore.cluster.catalog.etcd import EtcdCatalog
from kvstore.cluster.catalog.etcd_channel import Credentials
from kvstore.config.daemon import ClusterConfig
from kvstore.errors import KVStoreError, Unavailable
from tests.helpers.api import Certificates
from tests.helpers.etcd import Etcd

QUOTA_BYTES = 1 << 20
VALUE = bytes(60 << 10)
FAULTS = ("password", "certificate", "restart", "compaction", "quota")
PATIENCE_S = 60.0


class FaultyEtcd:
    """One server. ``break_`` and ``mend`` are the two halves of each fault: members notice the first, and have to be
    as before after the second. A restart and a compaction are over at once."""

    def __init__(self, folder: Path) -> None:
        self._sets = [Certificates(made) for made in (folder / "old", folder / "new") if not made.mkdir()]  # type: ignore[func-returns-value]
        self._servers_files, self._ours = folder / "server", folder / "ours"
        for made in (self._servers_files, self._ours):
            made.mkdir()
        self._which, self._password = 0, 0
        self._put(self._servers_files)
        self._put(self._ours)
        self._admins = folder / "admin-password"
        self._write(self._admins, "root")
        self._passwords = folder / "password"
        self._write(self._passwords, "secret-0")
        served = self._servers_files
        flags = ("--cert-file", str(served / "server.pem"), "--key-file", str(served / "server.key"))
        flags += ("--trusted-ca-file", str(served / "ca.pem"), "--client-cert-auth", "--bcrypt-cost", "4")
        flags += ("--quota-backend-bytes", str(QUOTA_BYTES), "--heartbeat-interval", "50", "--election-timeout", "500")
        self.etcd = Etcd(folder / "etcd", flags=flags, scheme="https")
        self._admin(self._enable_users())

    def config(self, ttl_s: float) -> ClusterConfig:
        """Of a daemon in its pool."""
        return ClusterConfig(
            catalog="etcd://" + ",".join(self.etcd.endpoints),
            catalog_ttl_s=ttl_s,
            catalog_ca=self._ours / "ca.pem",
            catalog_cert=self._ours / "client.pem",
            catalog_key=self._ours / "client.key",
            catalog_user="kvstore",
            catalog_password_file=self._passwords,
        )

    def break_(self, fault: str) -> None:
        match fault:
            case "password":
                self._password += 1
                self._admin(self._change_password(f"secret-{self._password}"))
            case "certificate":
                self._which = 1 - self._which
                self._put(self._servers_files)
                self._restart()
            case "restart":
                self._restart()
            case "compaction":
                self._admin(self._compact())
            case "quota":
                self._admin(self._fill())

    def mend(self, fault: str) -> None:
        match fault:
            case "password":
                self._write(self._passwords, f"secret-{self._password}")
            case "certificate":
                self._put(self._ours)
            case "quota":
                self._admin(self._clear())

    def close(self) -> None:
        self.etcd.close()

    def ask_for_users(self, asked: bool) -> None:
        """Switch users off, as operators do while they change them, and on again."""
        self._admin(self._switch_users(asked))

    def outage(self, seconds: float) -> None:
        """Away for that long, and the same as before after that."""
        self.etcd.members[0].kill()
        time.sleep(seconds)
        self._restart()

    def _restart(self) -> None:
        self.etcd.members[0].kill()
        self.etcd.restart()
        self.etcd.members[0].wait_serving()

    def _put(self, folder: Path) -> None:
        for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key"):
            draft = folder / "draft"
            shutil.copy(self._sets[self._which].path(name), draft)
            draft.rename(folder / name)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        draft = path.with_suffix(".draft")
        draft.write_text(text)
        draft.chmod(0o600)
        draft.rename(path)

    # --- in the name of an operator --------------------------------------------------------------------------------

    def _admin(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run(asyncio.wait_for(work, PATIENCE_S))

    def _catalog(self, user: str = "root") -> EtcdCatalog:
        made = self._sets[self._which].folder
        files = made / "ca.pem", made / "client.pem", made / "client.key"
        return EtcdCatalog(self.etcd.endpoints, Credentials(*files, user, self._admins))

    async def _enable_users(self) -> None:
        async with self._catalog("") as catalog:
            pb = catalog._pb
            for name, password in (("root", "root"), ("kvstore", "secret-0")):
                request = pb.AuthUserAddRequest(name=name, password=password)
                await catalog._call("Auth/UserAdd", request, pb.AuthUserAddResponse)
                grant = pb.AuthUserGrantRoleRequest(user=name, role="root")
                await catalog._call("Auth/UserGrantRole", grant, pb.AuthUserGrantRoleResponse)
        await self._switch_users(asked=True)

    async def _switch_users(self, asked: bool) -> None:
        async with self._catalog("" if asked else "root") as catalog:
            pb, name = catalog._pb, "AuthEnable" if asked else "AuthDisable"
            request, answer = getattr(pb, f"{name}Request"), getattr(pb, f"{name}Response")
            await catalog._call(f"Auth/{name}", request(), answer)

    async def _change_password(self, password: str) -> None:
        async with self._catalog() as catalog:
            pb = catalog._pb
            request = pb.AuthUserChangePasswordRequest(name="kvstore", password=password)
            await catalog._call("Auth/UserChangePassword", request, pb.AuthUserChangePasswordResponse)

    async def _compact(self) -> None:
        async with self._catalog() as catalog:
            pb = catalog._pb
            try:
                await catalog.publish("/other/compacted", b"")
            except Unavailable:
                pass  # without any space there is only less to compact
            try:
                request = pb.CompactionRequest(revision=(await catalog.listing("/other/")).revision, physical=True)
                await catalog._call("KV/Compact", request, pb.CompactionResponse)
            except KVStoreError as error:
                assert "compacted" in str(error), error

    async def _fill(self) -> None:
        async with self._catalog() as catalog:
            for number in range(10 * QUOTA_BYTES // len(VALUE)):
                try:
                    await catalog.publish(f"/other/fill/{number % 4}", VALUE)
                except Unavailable as error:
                    assert "quota" in str(error)
                    return
        raise AssertionError("it has no quota")

    async def _clear(self) -> None:
        async with self._catalog() as catalog:
            pb = catalog._pb
            for number in range(4):
                await catalog.retract(f"/other/fill/{number}")
            await self._compact()
            await catalog._call("Maintenance/Defragment", pb.DefragmentRequest(), pb.DefragmentResponse)
            raised = await catalog._call("Maintenance/Alarm", pb.AlarmRequest(), pb.AlarmResponse)
            for each in raised.alarms:
                disarm = pb.AlarmRequest(action=pb.AlarmRequest.DEACTIVATE, memberID=each.memberID, alarm=each.alarm)
                await catalog._call("Maintenance/Alarm", disarm, pb.AlarmResponse)
