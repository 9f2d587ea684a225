"""Reports on a run: the table printed at its end, and an HTML page with figures."""

from sparrow.report.calibration import draw_calibration
from sparrow.report.measurement import draw_measurement, is_measurement, read_measurement
from sparrow.report.page import write_report
from sparrow.report.summary import summary_rows
from sparrow.run.log import RunLog
