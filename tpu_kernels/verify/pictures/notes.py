"""What a reader has to know, at the end of every page."""

from __future__ import annotations

NOTES = """<h2 id="notes">How to read this</h2>
<ul>
<li><b>No figure here was measured.</b> The TPU's own compiler made the code; its time is
estimated by executing the code's scalar program with one cycle per bundle, the matrix units'
occupancy and a queue in front of HBM.</li>
<li><b>Confidence</b>: <i>simulated</i> is within about 10 % for most kernels of 0.2 ms and more;
<i>approximate</i> means that something was guessed, or that no published times exist for the
chip;
<i>roofline</i> that only a lower bound is known. Differences under 5 % mean nothing, and times
under 100 µs leave out the launch.</li>
<li><b>Roofline</b>: a point on its dashed line to the ceiling shows how much is left. Matrix
kernels stand under the MXU's ceiling (in bf16 operations; 8-bit ones count by the time that they
take), others under the vector unit's. A ring at the right edge reads and writes nothing in HBM:
XLA has moved its operands to VMEM.</li>
<li><b>Units</b>: the share of each unit's capacity that the hottest block of code uses. The unit
near 100 % is what to relieve; if none is, instructions wait for each other.</li>
<li><b>Vector memory</b>: the compiler's own allocation, each buffer by itself; hatched parts are
padding.</li>
<li><b>Pipeline</b>: the first and the last steps. A grid step's blocks arrive one step before it
computes, and its result leaves in the step after, so there are one or two steps more than the
grid has. Hatched time is lost in waiting: blocks too small, or more bytes than HBM can move.</li>
</ul>"""
"""The section, as HTML."""
