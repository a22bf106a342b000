#!/bin/sh
# Stands for a C++ compiler where a build's files matter and not what is in them: every output is the start of a binary.
case "$*" in *-dM*)
  printf '#define __GNUC__ 14\n#define __GNUC_MINOR__ 0\n#define __GNUC_PATCHLEVEL__ 0\n'
  exit
esac
start='\177ELF'
case "$*" in *-bundle*) start='\317\372\355\376' ;; esac  # a Mac's
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then printf "$start" >"$2"; fi
  shift
done
