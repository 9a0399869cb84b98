// SPDX-License-Identifier: Apache-2.0

package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A configuration file is taken, or refused by lines that a terminal can show.
func FuzzFile(f *testing.F) {
	examples, err := filepath.Glob("../../deploy/*/*.yaml")
	if err != nil {
		f.Fatal(err)
	}
	for _, name := range examples {
		if b, err := os.ReadFile(name); err == nil {
			f.Add(string(b))
		}
	}
	f.Add("rules: [{match: {ports: [80, 9000-9100], name: 'web*'}, action: allow, hostPort: 8080, hostAddress: all}]\nexpose: loopback\n")
	f.Add("sink: [gvproxy=http://192.168.127.1, hostlink]\nholdDown: 150ms\nunread: {a: [b]}\n")
	f.Add("connect: [vsock://3:1023, {endpoint: 'unix:///run/a', name: b}]\nbind: 127.0.0.2\n")
	f.Fuzz(func(t *testing.T, text string) {
		agent, host := DefaultAgent(), DefaultHost()
		check := func(what string, l *loader) {
			if err := l.file("c.yaml", []byte(text)); err != nil && strings.ContainsAny(err.Error(), "\x00\x1b\x7f") {
				t.Errorf("%s: the error has control characters: %q", what, err)
			}
		}
		check("agent", newLoader(&agent, &agent.Common, agent.fields(), nil, nil))
		check("host", newLoader(&host, &host.Common, host.fields(), nil, nil))
	})
}
