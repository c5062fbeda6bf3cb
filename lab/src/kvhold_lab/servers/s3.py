"""S3 servers: moto, and a real Ceph gateway (starts in 16 s, 200 MB).

Buckets end with the process. Needs boto3.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol
from urllib.parse import urlencode
from urllib.request import Request, urlopen
from uuid import uuid4

from kvhold_lab.servers.base import NotInstalled, ServerProcess, free_port, program

_REGION = "us-east-1"
_MOTO = "pip install 'moto[server]'"
_CEPH = "apt-get install --no-install-recommends ceph-mon ceph-osd radosgw ceph-common"
_ALL_RIGHTS = (
    '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}'
)


class S3Server(Protocol):
    port: int
    access_key_id: str
    secret_access_key: str


class MotoServer(ServerProcess):
    def __init__(self) -> None:
        super().__init__()
        self.access_key_id = "kvhold-test-id"
        self.secret_access_key = "kvhold-test-key"

    def command(self) -> Sequence[str]:
        for module in ("moto", "flask", "boto3"):
            if importlib.util.find_spec(module) is None:
                raise NotInstalled(f"{module} is not installed here: {_MOTO}")
        return [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "moto.server",
            "-H",
            "127.0.0.1",
            "-p",
            str(self.port),
        ]

    def create_bucket(self, name: str) -> None:
        boto_client(self, "s3").create_bucket(Bucket=name)

    def url(self, place: str, **options: object) -> str:
        return tier_url(self, place, options)

    def demand_credentials(self) -> None:
        """`url` then has the keys of a new user."""
        iam = boto_client(self, "iam")
        iam.create_user(UserName="kvhold")
        iam.put_user_policy(UserName="kvhold", PolicyName="all", PolicyDocument=_ALL_RIGHTS)
        key = iam.create_access_key(UserName="kvhold")["AccessKey"]
        self.access_key_id, self.secret_access_key = key["AccessKeyId"], key["SecretAccessKey"]
        with urlopen(
            Request(
                f"{endpoint_url(self)}/moto-api/reset-auth",
                data=b"0",
                headers={"Content-Type": "text/plain"},
                method="POST",
            ),
            timeout=10,
        ):
            pass


class CephGateway(ServerProcess):
    def __init__(self) -> None:
        super().__init__()
        self.access_key_id = "kvhold-test-id"
        self.secret_access_key = "kvhold-test-key"

    def command(self) -> Sequence[str]:
        for name in ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool", "ceph"):
            program(name, _CEPH)
        if importlib.util.find_spec("boto3") is None:
            raise NotInstalled(f"boto3 is not installed here: {_MOTO}")
        monitor_port, fsid = free_port(), uuid4()
        config = _CEPH_CONF.format(
            folder=self.folder, port=self.port, monitor_port=monitor_port, fsid=fsid
        )
        (self.folder / "ceph.conf").write_text(config)
        script = _CEPH_SCRIPT.format(
            monitor_port=monitor_port,
            fsid=fsid,
            key_id=self.access_key_id,
            key=self.secret_access_key,
        )
        return ["/bin/bash", "-c", script]

    def stop(self) -> None:
        """The monitor and the OSD must not outlive the gateway."""
        self.kill()

    def create_bucket(self, name: str) -> None:
        boto_client(self, "s3").create_bucket(Bucket=name)

    def url(self, place: str, **options: object) -> str:
        return tier_url(self, place, options)


def endpoint_url(server: S3Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def tier_url(server: S3Server, place: str, options: dict[str, object]) -> str:
    settings = {
        "endpoint": endpoint_url(server),
        "region": _REGION,
        "access_key_id": server.access_key_id,
        "secret_access_key": server.secret_access_key,
    }
    return f"s3://{place}?{urlencode(settings | options)}"


def boto_client(server: S3Server, service: str) -> Any:
    return import_module("boto3").client(
        service,
        endpoint_url=endpoint_url(server),
        region_name=_REGION,
        aws_access_key_id=server.access_key_id,
        aws_secret_access_key=server.secret_access_key,
    )


_CEPH_CONF = """\
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{monitor_port}]
mon initial members = a
auth cluster required = none
auth service required = none
auth client required = none
ms bind msgr1 = false
ms bind msgr2 = true
ms mon client mode = crc secure
public addr = 127.0.0.1
cluster addr = 127.0.0.1
run dir = {folder}/run
admin socket = {folder}/run/$name.asok
log file = {folder}/$name.log
crash dir = {folder}/run
keyring = {folder}/keyring
mon data = {folder}/mon
mon data avail crit = 0
mon allow pool size one = true
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd memory target = 939524096
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd crush chooseleaf type = 0
rgw data = {folder}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw dynamic resharding = false
rgw thread pool size = 64
"""

_CEPH_SCRIPT = """\
set -e
export CEPH_CONF=$PWD/ceph.conf
rm -rf mon osd rgw run && mkdir -p mon osd rgw run && touch keyring
monmaptool --create --clobber --fsid {fsid} --addv a "[v2:127.0.0.1:{monitor_port}]" monmap
ceph-mon --mkfs -i a --monmap monmap
ceph-mon -f -i a &
test "$(ceph --connect-timeout 30 osd create)" = 0
ceph-osd --mkfs -i 0
ceph-osd -f -i 0 &
ceph osd crush add osd.0 1 root=default host=localhost
radosgw-admin user create --uid=kvhold --display-name=kvhold --access-key={key_id} --secret={key}
exec radosgw -f -n client.rgw
"""
