#!/bin/sh
# Stands for a C++ compiler where a build's files matter and not what is in them: every output is the start of a binary.
case "$*" in *-dM*)
  printf '#define __GNUC__ 14\n#define __GNUC_MINOR__ 0\n#define __GNUC_PATCHLEVEL__ 0\n'
  exit
esac
case "$*" in *-bundle*|*-dynamiclib*) system=macOS ;; *) system=Linux ;; esac
binary() { if [ $system = macOS ]; then printf '\317\372\355\376'; else printf '\177ELF'; fi; }
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then binary >"$2"; fi
  shift
done
