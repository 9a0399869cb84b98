// SPDX-License-Identifier: Apache-2.0

//go:build linux

package gather

import (
	"bufio"
	"compress/gzip"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/status/doctor"
)

// maxConfig limits a kernel's configuration, which is a quarter of a MiB.
const maxConfig = 8 << 20

// kernelConfig returns the options that are set of those that package doctor wants, and the
// file below root that has them. It returns nil if no file can be read.
func kernelConfig(root, release string) (set map[string]string, file string) {
	for _, file := range []string{"/proc/config.gz", "/boot/config-" + release, "/lib/modules/" + release + "/config"} {
		if set, err := readConfig(filepath.Join(root, file)); err == nil {
			return set, file
		}
	}
	return nil, ""
}

func readConfig(file string) (map[string]string, error) {
	f, err := os.Open(filepath.Clean(file))
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	var r io.Reader = f
	if strings.HasSuffix(file, ".gz") {
		if r, err = gzip.NewReader(f); err != nil {
			return nil, err
		}
	}
	set, options := make(map[string]string), doctor.KernelOptions()
	lines := bufio.NewScanner(io.LimitReader(r, maxConfig))
	for lines.Scan() {
		if name, value, ok := strings.Cut(lines.Text(), "="); ok && slices.Contains(options, name) {
			set[name] = value
		}
	}
	return set, lines.Err()
}

// chosen returns the word in brackets of a file as "none [integrity] confidentiality".
func chosen(text string) string {
	_, text, _ = strings.Cut(text, "[")
	word, _, _ := strings.Cut(text, "]")
	return word
}
