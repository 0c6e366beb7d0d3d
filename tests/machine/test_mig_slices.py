"""Slices of a GPU from the list and the table that nvidia-smi prints."""

import pytest

from bigload.machine.accelerators.gpus import detect_gpus
from bigload.machine.accelerators.mig_slices import read_slices, visible_slice
from bigload.units import MIB

# Recorded on an A100 of MAX IV: README of the Helm chart of MortalGPU (gitlab.com/MaxIV/kubernetes/mortalgpu).
LIST = """\
GPU 0: NVIDIA A100 80GB PCIe (UUID: GPU-4101de38-535a-4255-ac14-a63e072d7a10)
  MIG 3g.40gb     Device  0: (UUID: MIG-d771d938-b556-4f9d-b742-2dd26b864023)
  MIG 2g.20gb     Device  1: (UUID: MIG-08bce7f3-bac7-4715-b56f-91541f15fe37)
  MIG 1g.10gb     Device  2: (UUID: MIG-761ea9d1-82ac-41cb-9e19-d3593973f144)
  MIG 1g.10gb     Device  3: (UUID: MIG-a5b1e9ac-1c96-4ca0-b57c-53878e7531dc)
"""
TABLE = """\
+-----------------------------------------------------------------------------+
| MIG devices:                                                                |
+------------------+----------------------+-----------+-----------------------+
| GPU  GI  CI  MIG |         Memory-Usage |        Vol|         Shared        |
|      ID  ID  Dev |           BAR1-Usage | SM     Unc| CE  ENC  DEC  OFA  JPG|
|                  |                      |        ECC|                       |
|==================+======================+===========+=======================|
|  0    2   0   0  |     19MiB / 40192MiB | 42      0 |  3   0    2    0    0 |
|                  |      0MiB / 65535MiB |           |                       |
+------------------+----------------------+-----------+-----------------------+
|  0    3   0   1  |     13MiB / 19968MiB | 28      0 |  2   0    1    0    0 |
|                  |      0MiB / 32767MiB |           |                       |
+------------------+----------------------+-----------+-----------------------+
|  0    9   0   2  |      6MiB /  9728MiB | 14      0 |  1   0    0    0    0 |
|                  |      0MiB / 16383MiB |           |                       |
+------------------+----------------------+-----------+-----------------------+
|  0   10   0   3  |      6MiB /  9728MiB | 14      0 |  1   0    0    0    0 |
|                  |      0MiB / 16383MiB |           |                       |
+------------------+----------------------+-----------+-----------------------+
"""
# The form of newer drivers, recorded on an H100 NVL (R550): wider columns, and a space more.
WIDE = """\
| MIG devices:                                                                            |
+------------------+----------------------------------+-----------+-----------------------+
| GPU  GI  CI  MIG |              Shared Memory-Usage |        Vol|        Shared         |
|==================+==================================+===========+=======================|
|  0    7   0   0  |              13MiB / 10880MiB    | 16      0 |  1   0    1    0    1 |
|                  |                 0MiB / 16383MiB  |           |                       |
+------------------+----------------------------------+-----------+-----------------------+
|  0    7   1   1  |                                  | 16      0 |  1   0    1    0    1 |
+------------------+----------------------------------+-----------+-----------------------+
"""


def test_every_slice_has_the_memory_that_its_row_says():
    slices = read_slices(LIST, TABLE)
    assert [(each.profile, each.total_bytes // MIB, each.free_bytes // MIB) for each in slices] == [
        ("3g.40gb", 40192, 40173),
        ("2g.20gb", 19968, 19955),
        ("1g.10gb", 9728, 9722),
        ("1g.10gb", 9728, 9722),
    ]
    assert slices[3].instances == (10, 0)


def test_compute_instances_share_the_memory_of_their_gpu_instance():
    listed = LIST.replace("3g.40gb", "1c.2g.24gb").replace("2g.20gb", "1c.2g.24gb")
    assert [(each.free_bytes, each.instances) for each in read_slices(listed, WIDE)] == [
        (10867 * MIB, (7, 0)),
        (10867 * MIB, (7, 1)),
    ]


@pytest.mark.parametrize(
    ("listed", "profile"),
    [
        ("MIG-08bce7f3-bac7-4715-b56f-91541f15fe37", "2g.20gb"),
        ("MIG-08bce", "2g.20gb"),
        ("MIG-08bce,MIG-d771d938", "2g.20gb"),
        ("MIG-GPU-4101de38-535a-4255-ac14-a63e072d7a10/9/0", "1g.10gb"),
        ("MIG-", None),
        ("MIG-feed", None),
        ("0", "3g.40gb"),
        (None, "3g.40gb"),
    ],
)
def test_a_program_sees_the_slice_that_is_named_or_the_first(listed, profile):
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    found = visible_slice(read_slices(LIST, TABLE), environ, gpu=0)
    assert (found.profile if found else None) == profile


@pytest.mark.parametrize(
    "texts", [("", ""), (LIST, ""), ("", TABLE), (LIST, "| MIG devices:\n|  No MIG devices found  |")]
)
def test_without_one_of_the_texts_there_are_no_slices(texts):
    assert read_slices(*texts) == []


def test_the_size_of_a_slice_is_found_by_the_program_itself(tmp_path):
    query = "0, GPU-4101de38-535a-4255-ac14-a63e072d7a10, 81920, 81000, Enabled, NVIDIA A100 80GB PCIe"
    program = tmp_path / "nvidia-smi"
    lines = [
        "#!/bin/sh",
        f"case \"$1\" in -L) echo '{LIST}';; '') echo '{TABLE}';; *) echo '{query}';; esac",
    ]
    program.write_text("\n".join(lines))
    program.chmod(0o755)
    found = detect_gpus(environ={"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "MIG-a5b1e9ac"})
    (memory,) = found.memory
    assert str(memory) == "cuda:0 9.49 GiB free of 9.50 GiB (nvidia-smi, MIG 1g.10gb of GPU 0)"
    assert found.unknown == ()
