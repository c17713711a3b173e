"""Who makes up the job, and which process sets it begins with."""

import pathlib

from tests.harness import ranks


def test_ranks_and_communicators(tmp_path: pathlib.Path) -> None:
    script = """
        from mpi4py import MPI
        import hvd_keras as hvd
        me = MPI.COMM_WORLD.Get_rank()

        # Some of the ranks, in an order of their own.
        try:
            hvd.init(comm=[2, 0])
            assert me != 1
            assert (hvd.rank(), hvd.size()) == ({2: 0, 0: 1}[me], 2)
            assert hvd.allgather([me]).numpy().tolist() == [2, 0]
        except ValueError as error:
            assert me == 1 and "MPI's rank 1, which comm does not list" in str(error), error
            hvd.init(comm=[1])
            assert (hvd.rank(), hvd.size()) == (0, 1)
        hvd.shutdown()

        # Two jobs beside each other.
        color = me % 2
        hvd.init(comm=MPI.COMM_WORLD.Split(color, -me))
        mine = [r for r in (2, 1, 0) if r % 2 == color]
        assert (hvd.rank(), hvd.size()) == (mine.index(me), len(mine))
        assert int(hvd.allreduce(me, op=hvd.Sum)) == sum(mine)
        hvd.shutdown()

        # All, with sets.
        pair = hvd.ProcessSet([0, 1])
        hvd.init(process_sets=[pair, [1, 2]])
        assert (hvd.rank(), hvd.size(), pair.process_set_id) == (me, 3, pair.id())
        if pair.included():
            assert int(hvd.allreduce(me, op=hvd.Sum, process_set=pair)) == 1
        hvd.shutdown()
        assert pair.process_set_id is None

        for wrong, text in (([0, 0], "each once"), ([0, 7], "rank 7 of comm does not exist")):
            try:
                hvd.init(comm=wrong)
                raise SystemExit("no error")
            except ValueError as error:
                assert text in str(error), error
        print("right")
    """
    job = ranks.run_script(tmp_path, 3, script)
    assert job.status == 0, job.output
    assert job.output.count("right") == 3, job.output


def test_what_mpi_refuses_is_no_wrong_value(tmp_path: pathlib.Path) -> None:
    script = """
        from mpi4py import MPI
        import hvd_keras as hvd

        MPI.Finalize()
        try:
            hvd.init(comm=[0])
        except RuntimeError as error:
            print("MPI has been finalised" in str(error))
    """
    job = ranks.run_script(tmp_path, 1, script)
    assert job.status == 0, job.output
    assert job.output.count("True") == 1, job.output
