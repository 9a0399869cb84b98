// SPDX-License-Identifier: Apache-2.0

package config

import (
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

const testPin = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"

func TestServerText(t *testing.T) {
	for text, want := range map[string]string{
		"wss://hub.example":           "wss://hub.example:443",
		"wss://hub.example/":          "wss://hub.example:443",
		"wss://hub.example:8443/web1": "wss://hub.example:8443/web1",
		"wss://[2001:db8::1]/a":       "wss://[2001:db8::1]:443/a",
		"wss://[2001:db8::1]:8443":    "wss://[2001:db8::1]:8443",
		"wss://192.0.2.1:8443/a":      "wss://192.0.2.1:8443/a",
		"wss://":                      "",
		"wss://:8443":                 "",
		"wss://hub:0":                 "",
		"wss://hub:65536":             "",
		"wss://user@hub":              "",
		"wss://hub?x=1":               "",
		"wss://hub/a/b":               "",
		"wss://hub/a b":               "",
		"wss://hub/../x":              "",
		"wss://hub\r\nHost: x":        "",
		"ws://hub":                    "",
	} {
		e, err := ParseEndpoint(text)
		if want == "" {
			if err == nil {
				t.Errorf("%q is %q", text, e)
			}
			continue
		}
		if err != nil || e.String() != want {
			t.Errorf("%q: %q, %v, want %q", text, e, err, want)
			continue
		}
		if again, err := ParseEndpoint(e.String()); err != nil || again != e {
			t.Errorf("%q is read as %+v, %v", e, again, err)
		}
	}
}

// The variables of older agents count below fairlead's own and above the file.
func TestVariablesOfOlderAgents(t *testing.T) {
	file := write(t, filepath.Join(t.TempDir(), "a.yaml"), "link: unix:///from-file\n")
	for _, tt := range []struct {
		name        string
		env         map[string]string
		link, pin   string
		level       slog.Level
		wantErr     string
		fromSetting string
	}{
		{"path", map[string]string{"CATTLE_SERVER": "https://hub.example/some/path"}, "", "", 0, `CATTLE_SERVER: link: "https://hub.example/some/path": want`, ""},
		{"path that looks like a name", map[string]string{"CATTLE_SERVER": "https://hub.example/k8s"}, "", "", 0, `CATTLE_SERVER: link: "https://hub.example/k8s": want`, ""},
		{"name", map[string]string{"CATTLE_SERVER": "wss://hub.example/web1/"}, "wss://hub.example:443/web1", "", slog.LevelInfo, "", "CATTLE_SERVER"},
		{"port and slashes", map[string]string{"CATTLE_SERVER": "https://hub.example:8443//"}, "wss://hub.example:8443", "", slog.LevelInfo, "", "CATTLE_SERVER"},
		{"scheme in upper case", map[string]string{"CATTLE_SERVER": "HTTPS://hub.example"}, "wss://hub.example:443", "", slog.LevelInfo, "", "CATTLE_SERVER"},
		{"IPv6", map[string]string{"CATTLE_SERVER": "https://[2001:db8::1]"}, "wss://[2001:db8::1]:443", "", slog.LevelInfo, "", "CATTLE_SERVER"},
		{"IPv6 with port, no scheme", map[string]string{"CATTLE_SERVER": "[2001:db8::1]:8443"}, "wss://[2001:db8::1]:8443", "", slog.LevelInfo, "", "CATTLE_SERVER"},
		{"IPv6 without brackets", map[string]string{"CATTLE_SERVER": "https://2001:db8::1"}, "", "", 0, "CATTLE_SERVER: link:", ""},
		{"empty", map[string]string{"CATTLE_SERVER": "", "CATTLE_CA_CHECKSUM": "", "CATTLE_DEBUG": ""}, "unix:///from-file", "", slog.LevelInfo, "", ""},
		{"blank", map[string]string{"CATTLE_SERVER": " \n", "CATTLE_CA_CHECKSUM": " \n"}, "unix:///from-file", "", slog.LevelInfo, "", ""},
		{"spaces", map[string]string{"CATTLE_SERVER": " hub.example \n", "CATTLE_CA_CHECKSUM": testPin + "\n"}, "wss://hub.example:443", testPin, slog.LevelInfo, "", "CATTLE_SERVER"},
		{"scheme alone", map[string]string{"CATTLE_SERVER": "https://"}, "", "", 0, "CATTLE_SERVER: link:", ""},
		{"two schemes", map[string]string{"CATTLE_SERVER": "https://wss://hub"}, "", "", 0, "CATTLE_SERVER: link:", ""},
		{"port 0", map[string]string{"CATTLE_SERVER": "https://hub:0"}, "", "", 0, "CATTLE_SERVER: link:", ""},
		{"path without a scheme", map[string]string{"CATTLE_SERVER": "hub.example/k8s"}, "", "", 0, `CATTLE_SERVER: link: "hub.example/k8s": want`, ""},
		{"slash without a scheme", map[string]string{"CATTLE_SERVER": "hub.example/"}, "wss://hub.example:443", "", slog.LevelInfo, "", "CATTLE_SERVER"},
		{"slash alone", map[string]string{"CATTLE_SERVER": "/"}, "", "", 0, "CATTLE_SERVER: link:", ""},
		{"checksum with a space inside", map[string]string{"CATTLE_CA_CHECKSUM": testPin[:32] + " " + testPin[32:]}, "", "", 0, "CATTLE_CA_CHECKSUM: linkPin:", ""},
		{"checksum as sha256sum prints it", map[string]string{"CATTLE_CA_CHECKSUM": testPin + "  -"}, "", "", 0, "CATTLE_CA_CHECKSUM: linkPin:", ""},
		{"short checksum", map[string]string{"CATTLE_CA_CHECKSUM": testPin[1:]}, "", "", 0, "CATTLE_CA_CHECKSUM: linkPin:", ""},
		{"long checksum", map[string]string{"CATTLE_CA_CHECKSUM": testPin + "0"}, "", "", 0, "CATTLE_CA_CHECKSUM: linkPin:", ""},
		{"no checksum", map[string]string{"CATTLE_CA_CHECKSUM": strings.Repeat("g", 64)}, "", "", 0, "CATTLE_CA_CHECKSUM: linkPin:", ""},
		{"our pin first", map[string]string{"CATTLE_CA_CHECKSUM": "abc", "FAIRLEAD_LINK_PIN": testPin}, "unix:///from-file", testPin, slog.LevelInfo, "", ""},
		{"no word for true", map[string]string{"CATTLE_DEBUG": "loud"}, "unix:///from-file", "", slog.LevelInfo, "", ""},
		{"none", nil, "unix:///from-file", "", slog.LevelInfo, "", ""},
		{"with scheme", map[string]string{"CATTLE_SERVER": "https://hub.example/"}, "wss://hub.example:443", "", slog.LevelInfo, "", "CATTLE_SERVER"},
		{"without scheme", map[string]string{"CATTLE_SERVER": "hub.example:8443"}, "wss://hub.example:8443", "", slog.LevelInfo, "", "CATTLE_SERVER"},
		{"all", map[string]string{"CATTLE_SERVER": "wss://hub", "CATTLE_CA_CHECKSUM": strings.ToUpper(testPin), "CATTLE_DEBUG": "true"},
			"wss://hub:443", testPin, slog.LevelDebug, "", "CATTLE_SERVER"},
		{"ours first", map[string]string{"CATTLE_SERVER": "old", "FAIRLEAD_LINK": "unix:///new", "CATTLE_DEBUG": "1", "FAIRLEAD_LOG_LEVEL": "warn"},
			"unix:///new", "", slog.LevelWarn, "", "FAIRLEAD_LINK"},
		{"no debug", map[string]string{"CATTLE_DEBUG": "false"}, "unix:///from-file", "", slog.LevelInfo, "", ""},
		{"unencrypted", map[string]string{"CATTLE_SERVER": "http://hub"}, "", "", 0, "CATTLE_SERVER: link:", ""},
		{"wrong checksum", map[string]string{"CATTLE_CA_CHECKSUM": "abc"}, "", "", 0, "CATTLE_CA_CHECKSUM: linkPin:", ""},
	} {
		c, err := LoadAgent(file, nil, lookup(tt.env))
		if tt.wantErr != "" {
			if err == nil || !strings.HasPrefix(err.Error(), tt.wantErr) {
				t.Errorf("%s: %v", tt.name, err)
			}
			continue
		}
		if err != nil || c.Link[0].String() != tt.link || c.TLS.Pin != tt.pin || c.LogLevel != tt.level {
			t.Errorf("%s: %v %q %v, %v", tt.name, c.Link, c.TLS.Pin, c.LogLevel, err)
		}
		if tt.fromSetting != "" && !slices.ContainsFunc(c.Settings(), func(s Setting) bool { return s.Key == "link" && s.From == tt.fromSetting }) {
			t.Errorf("%s: the link is not from %s", tt.name, tt.fromSetting)
		}
	}
}

// An address with a password or a token is refused, and neither is shown.
func TestErrorsOfAddressesHideSecrets(t *testing.T) {
	file := write(t, filepath.Join(t.TempDir(), "a.yaml"), "")
	for address, want := range map[string]string{
		"https://user:secret@hub":        `"wss://***@hub"`,
		"https://us@er:sec/ret@hub":      `"https://***@hub"`,
		"http://user:secret@hub":         `"http://***@hub"`,
		"user:secret@hub":                `"wss://***@hub"`,
		"hub?token=secret":               `"wss://hub?***"`,
		"wss://hub/x?token=secret":       `"wss://hub/x?***"`,
		"wss://hub/secret@x":             `"wss://***@x"`,
		"https://hub/x?token=secret@hub": `"https://***@hub"`,
	} {
		for _, name := range []string{"CATTLE_SERVER", "FAIRLEAD_LINK"} {
			_, err := LoadAgent(file, nil, lookup(map[string]string{name: address}))
			if err == nil || strings.Contains(err.Error(), "ret") || name == "CATTLE_SERVER" && !strings.Contains(err.Error(), want) {
				t.Errorf("%s=%s: %v, want %s", name, address, err, want)
			}
		}
	}
}

// A variable of older agents that is not used is named, if it asks for something else.
func TestOverriddenVariables(t *testing.T) {
	both := func(older, own string) string {
		return "environment variable " + older + " is overridden by " + own + ", which differs"
	}
	for name, tt := range map[string]struct{ environ, want []string }{
		"none":        {[]string{"HOME=/", "FAIRLEAD_LINK=unix:///x"}, nil},
		"older alone": {[]string{"CATTLE_SERVER=hub", "CATTLE_DEBUG=true", "CATTLE_CA_CHECKSUM=" + testPin}, nil},
		"same": {[]string{
			"CATTLE_SERVER=https://hub/", "FAIRLEAD_LINK=wss://hub:443", "CATTLE_DEBUG=1", "FAIRLEAD_LOG_LEVEL=debug",
			"CATTLE_CA_CHECKSUM=" + strings.ToUpper(testPin), "FAIRLEAD_LINK_PIN=" + testPin,
		}, nil},
		"empty": {[]string{"CATTLE_SERVER=", "FAIRLEAD_LINK=unix:///x", "CATTLE_DEBUG=false", "FAIRLEAD_LOG_LEVEL=warn"}, nil},
		"differ": {[]string{"CATTLE_SERVER=hub", "FAIRLEAD_LINK=unix:///x", "CATTLE_DEBUG=true", "FAIRLEAD_LOG_LEVEL=warn", "CATTLE_CA_CHECKSUM=x", "FAIRLEAD_LINK_PIN=" + testPin},
			[]string{both("CATTLE_SERVER", "FAIRLEAD_LINK"), both("CATTLE_CA_CHECKSUM", "FAIRLEAD_LINK_PIN"), both("CATTLE_DEBUG", "FAIRLEAD_LOG_LEVEL")}},
	} {
		if got := OverriddenVariables(tt.environ); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}

// withFlags loads an empty file with these flags.
func withFlags[T any](t *testing.T, register func(*pflag.FlagSet), load func(string, *pflag.FlagSet) (T, error), args string) (c T, err error) {
	t.Helper()
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	register(fs)
	if err := fs.Parse(strings.Fields(args)); err != nil {
		return c, err
	}
	return load(write(t, filepath.Join(t.TempDir(), "c.yaml"), ""), fs)
}

func TestServing(t *testing.T) {
	const all = "--listen wss://:8443 --guest a --guest b --cert /c --key /k"
	for args, want := range map[string]string{
		all: "",
		all + " --client-ca /ca --ca-bundle /b --link-token=": "",
		all + " --connect vsock://3:1023":                     "",
		all + " --connect a=vsock://3:1023":                   `connect: "a": given twice`,
		all + " --link-token=":                                "needs a token or --client-ca",
		all + " --guest a":                                    `guest: "a": given twice`,
		"--listen wss://:8443 --cert /c --key /k":             "guest: an empty list",
		"--listen wss://:8443 --guest a --key /k":             "wants --cert and --key",
		"--listen wss://hub":                                  "want wss://:PORT",
		"--listen https://:1":                                 "want wss://:PORT",
		"--listen wss://:8443 --guest ../x":                   "want a name of up to 63",
		"--guest a":                                           "guest: is only for --listen",
		"--cert /c":                                           "cert: is only for --listen",
		"--client-ca /c":                                      "clientCA: is only for --listen",
		"--connect wss://hub/a":                               "a host does not dial agents there",
	} {
		c, err := withFlags(t, new(Host).Flags, func(file string, fs *pflag.FlagSet) (Host, error) { return LoadHost(file, fs, nil) }, args)
		if want != "" {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q", args, err, want)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", args, err)
			continue
		}
		peers := c.Peers()
		if n := len(c.Connect); len(peers) != n+2 || n > 0 != strings.Contains(args, "--connect") || peers[n].ID() != "a" || peers[n].Endpoint.String() != "wss://:8443" {
			t.Errorf("%s: %v", args, peers)
		}
		if got := c.TokenFile(peers[len(peers)-1]); strings.Contains(args, "--client-ca") != (got == "") {
			t.Errorf("%s: token file %q", args, got)
		}
	}
}

func TestAgentThatDialsNeedsAProof(t *testing.T) {
	for args, want := range map[string]string{
		"--link wss://hub":               "",
		"--link wss://hub --link-token=": "needs a token or --link-cert",
		"--link wss://hub --link-token= --link-cert /c --link-key /k": "",
		"--link wss://hub --link-cert /c":                             "want --link-cert and --link-key",
		"--link wss://hub --link-pin 12":                              "64 hexadecimal digits",
	} {
		c, err := withFlags(t, new(Agent).Flags, func(file string, fs *pflag.FlagSet) (Agent, error) { return LoadAgent(file, fs, nil) }, args)
		if (want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
		if err == nil && (c.TokenFile() == "") != strings.Contains(args, "--link-cert") {
			t.Errorf("%s: token file %q", args, c.TokenFile())
		}
	}
}
