import subprocess
from pathlib import Path

import pytest

from bigload.machine.files.file_systems import FileSystem, file_system_of

MOUNTS = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /proc rw - proc proc rw
24 22 0:30 / /mnt rw - tmpfs tmpfs rw
25 24 0:31 / /mnt/net rw - nfs4 server:/export/models rw,vers=4.2
26 24 0:32 / /mnt/with\040blank rw - xfs /dev/mapper/vg-data rw
27 24 0:33 / /mnt/net/over rw - fuse.s3fs s3fs rw
28 24 0:34 / /mnt/twice rw - ext4 /dev/sda1 rw
29 28 0:35 / /mnt/twice rw - btrfs /dev/sdb rw
30 22 0:36 / /root rw master:1 propagate_from:2 - overlay overlay rw,lowerdir=/a - b
31 22 8:1 / /boot rw - vfat /dev/root rw
a line that makes no sense
32 22 - x
"""


@pytest.fixture
def mounts(tmp_path):
    (tmp_path / "mountinfo").write_text(MOUNTS)
    return tmp_path / "mountinfo"


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/models/a", "ext4 on vda"),
        ("/mnt", "tmpfs"),
        ("/mnt/network", "tmpfs"),
        ("/mnt/net/a", "nfs4 on server:/export/models"),
        ("/mnt/net/over/a", "fuse.s3fs"),
        ("/mnt/with blank/a", "xfs on vg-data"),
        ("/mnt/twice/a", "btrfs on sdb"),
        ("/root/a", "overlay"),
    ],
)
def test_the_innermost_and_last_mount_is_what_a_file_lies_on(mounts, path, shown):
    assert str(file_system_of(Path(path), mounts=mounts)) == shown


def test_the_disk_the_system_started_from_is_looked_up(mounts, tmp_path):
    (tmp_path / "8:1").symlink_to("../../devices/pci/nvme0n1p1")
    found = file_system_of(Path("/boot/a"), mounts=mounts, block_devices=tmp_path)
    assert found == FileSystem(kind="vfat", device="nvme0n1p1")
    assert str(file_system_of(Path("/boot/a"), mounts=mounts, block_devices=tmp_path / "gone")) == "vfat"


def test_links_are_followed(tmp_path, mounts):
    (tmp_path / "link").symlink_to("/mnt/net/a")
    assert file_system_of(tmp_path / "link", mounts=mounts).kind == "nfs4"


@pytest.mark.parametrize(
    ("kind", "is_network"),
    [("nfs4", True), ("lustre", True), ("fuse.sshfs", True), ("fuse", True), ("fuseblk", False), ("ext4", False)],
)
def test_network_file_systems_are_known(kind, is_network):
    assert FileSystem(kind=kind, device="").is_network is is_network


def test_a_system_that_does_not_list_its_mounts_is_unknown(tmp_path):
    assert file_system_of(Path("/"), mounts=tmp_path / "gone") is None


def test_the_same_is_found_as_by_findmnt(tmp_path):
    command = ["findmnt", "--noheadings", "--output", "FSTYPE", "--target", str(tmp_path)]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no findmnt here")
    assert file_system_of(tmp_path).kind == told.split()[-1]
