"""Known defects, a test for each, by public names.

A test carries the defect's numbers as ``@pytest.mark.defect("kfac-S2")``. Where the defect is not mended yet, the test
is also marked ``@pytest.mark.xfail(strict=True, raises=…, reason="kfac-S2")``: it states what a user expects, and turns
the suite red on the day that it comes true, so that the mark cannot be forgotten.
"""
