"""What every part uses: errors, random numbers, shape annotations, threads, tables."""
