"""The engine `lanes`: the program for one row, compiled so that SIMD lanes are rows."""
