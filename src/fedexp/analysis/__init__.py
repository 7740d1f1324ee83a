"""Tables, figures and reports: functions of outcomes and run folders."""
