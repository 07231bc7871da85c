#!/bin/sh
# Makes src/poolmeter/COMPONENT a link to COMPONENT again where an archive (the sdist) has put a copy in its place.
# Exits 2 where it is neither a link nor such a copy.
set -eu
cd "$(dirname "$0")/.."
for component in exporter collector accounting enforcer simulator dashboards alerts; do
    link=src/poolmeter/$component
    [ -L "$link" ] && continue
    if [ ! -d "$link" ]; then
        echo "this clone has no symbolic links ($link is no link and no folder): clone with core.symlinks=true" >&2
        exit 2
    fi
    # A copy that was changed is somebody's work: it is not thrown away.
    changed=$(cd "$link" && find . -type f ! -path '*/__pycache__/*' ! -exec cmp -s {} "../../../$component/{}" \; -print | head -n 1)
    if [ -n "$changed" ]; then
        echo "$link/${changed#./} is not the same as $component/${changed#./}, expected a link to the folder $component" >&2
        exit 2
    fi
    rm -r "$link"
    ln -s "../../$component" "$link"
done
