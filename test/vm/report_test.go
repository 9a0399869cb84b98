// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The tables in the documents are as the report writes them.
func TestReportOfDocuments(t *testing.T) {
	for _, a := range architectures() {
		_, want, _, err := readReport("../../docs/kernels.md", a.name)
		if err != nil {
			t.Fatal(err)
		}
		m := reported(t, want)
		if got := "\n" + m.tables() + "\n"; got != want {
			t.Errorf("%s: the report of these results is\n%s\nand the document has\n%s", a.name, got, want)
		}
	}
}

// reported returns the results of which tables are.
func reported(t *testing.T, tables string) *matrix {
	t.Helper()
	_, list, _ := strings.Cut(strings.TrimSuffix(strings.TrimSpace(tables), "."), "Releases: ")
	var m matrix
	var all []*column
	for _, release := range strings.Split(list, ", ") {
		m.begin(kernel{version: release, release: release})
		all = append(all, m.kernels[release])
	}
	kind := ""
	for line := range strings.Lines(tables) {
		row := cells(line)
		switch {
		case !strings.HasPrefix(line, "| ") || row[0] == "capability" || strings.HasPrefix(row[0], "test of"):
			if strings.HasPrefix(line, "| ") {
				kind = row[0] + " " + row[1]
			}
		case kind == "capability by":
			for _, title := range strings.Split(row[3], ", ") {
				for _, c := range all {
					if c.title() == title {
						c.methods[row[0]] += ": " + row[2]
					}
				}
			}
		default:
			for i, c := range all {
				switch cell := row[1+i]; {
				case cell == "–":
				case strings.HasPrefix(kind, "test"):
					c.tests[row[0]] = cell == "passed"
				default:
					c.methods[row[0]] = cell
				}
			}
		}
	}
	return &m
}

func TestReport(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kernels.md")
	if err := os.WriteFile(file, []byte("# Kernels\n\n"+reportBegin("amd64")+"old\n"+reportEnd+"\nafter\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var m matrix
	m.begin(kernel{version: "sid", release: "7.2.13+deb14-cloud-amd64"})
	m.begin(kernel{version: "5.10", release: "5.10.0-46-cloud-amd64"})
	m.begin(kernel{version: "wsl", release: "6.12.117-microsoft-standard-WSL2"})
	for _, line := range []string{
		`{"Action":"attr","Package":"sid/test/e2e","Test":"TestMethods","Key":"capability/tcp-listen","Value":"fentry"}`,
		`{"Action":"attr","Package":"5.10/test/e2e","Test":"TestMethods","Key":"capability/tcp-listen","Value":"poll: late, due to Linux 5.10"}`,
		`{"Action":"attr","Package":"5.10/test/e2e","Test":"TestMethods","Key":"capability/tcp-bind","Value":"poll, due to Linux 5.10"}`,
		`{"Action":"pass","Package":"sid/test/e2e","Test":"TestUDP"}`,
		`{"Action":"pass","Package":"sid/test/e2e","Test":"TestUDP/sub"}`,
		`{"Action":"fail","Package":"5.10/test/e2e","Test":"TestUDP"}`,
		`{"Action":"pass","Package":"wsl/test/e2e","Test":"TestUDP"}`,
		`{"Action":"skip","Package":"5.10/test/e2e","Test":"TestKinds"}`,
		`{"Action":"pass","Package":"sid/test/e2e","Test":"TestKinds"}`,
		`{"Action":"pass","Package":"6.1/test/e2e","Test":"TestOther"}`,
		`{"Action":"pass","Package":"sid/test/e2e"}`,
		`broken`,
	} {
		m.add([]byte(line))
	}
	native := architectures()[0]
	if err := m.complete([]string{"sid", "5.10", "wsl"}, native); err != nil {
		t.Error(err)
	}
	m.begin(kernel{version: "6.1", release: "6.1.0-56-cloud-amd64"})
	m.machine(kernel{version: "6.1"}, errors.New("panic"))
	if err := m.complete([]string{"sid", "6.1", "6.12"}, native); err == nil || !strings.Contains(err.Error(), "6.1, 6.12") {
		t.Errorf("kernels without results: %v", err)
	}
	delete(m.kernels, "6.1")
	for _, fault := range []error{nil, errors.New("BUG"), nil} {
		m.machine(kernel{version: "5.10"}, fault)
	}
	m.machine(kernel{version: "sid"}, nil)
	for range 2 {
		if err := m.write(file, "amd64"); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	want := "# Kernels\n\n" + reportBegin("amd64") + `
| capability | Linux 5.10 | Linux 6.12 as WSL's | Linux 7.2 |
|---|---|---|---|
| tcp-bind | poll | – | – |
| tcp-listen | poll | – | fentry |

| capability | by | loses | on Linux |
|---|---|---|---|
| tcp-listen | poll | late | 5.10 |

| test of test/e2e | Linux 5.10 | Linux 6.12 as WSL's | Linux 7.2 |
|---|---|---|---|
| TestKinds | – | – | passed |
| TestUDP | failed | passed | passed |
| the kernel reports no fault | failed | – | passed |

Releases: 5.10.0-46-cloud-amd64, 6.12.117-microsoft-standard-WSL2, 7.2.13+deb14-cloud-amd64.

` + reportEnd + "\nafter\n"
	if string(got) != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if err := m.compare(file, "amd64", io.Discard); err != nil {
		t.Errorf("the same methods: %v", err)
	}
	m.add([]byte(`{"Action":"attr","Package":"sid/test/e2e","Test":"TestMethods","Key":"capability/tcp-listen","Value":"kprobe: late"}`))
	m.begin(kernel{version: "6.1", release: "6.1.0-56-cloud-amd64"}) // the file does not have it
	m.add([]byte(`{"Action":"attr","Package":"6.1/test/e2e","Test":"TestMethods","Key":"capability/tcp-listen","Value":"poll"}`))
	if err := m.compare(file, "amd64", io.Discard); err == nil || err.Error() != "Linux 7.2: tcp-listen by kprobe; "+file+" has fentry" {
		t.Errorf("another method: error %v", err)
	}
	m.add([]byte(`{"Action":"attr","Package":"sid/test/e2e","Test":"TestMethods","Key":"capability/tcp-listen","Value":"fentry"}`))
	m.add([]byte(`{"Action":"attr","Package":"5.10/test/e2e","Test":"TestMethods","Key":"capability/nft-filter","Value":"socket"}`))
	if err := m.compare(file, "amd64", io.Discard); err == nil || err.Error() != "Linux 5.10: nft-filter by socket; "+file+" does not have it" {
		t.Errorf("a capability that the file lacks: error %v", err)
	}
	if err := os.WriteFile(file, []byte("# Kernels\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := m.write(file, "amd64"); err == nil || !strings.Contains(err.Error(), "has no lines") {
		t.Errorf("a file without marks: error %v", err)
	}
}
