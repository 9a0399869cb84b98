// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/fairlead/fairlead/internal/port"
)

func readSystem(context.Context) Firewall {
	rs, err := read()
	return system(rs, err, managerOf(os.DirFS("/")))
}

// system is the firewall that rules are; err is why they could not be read.
func system(rs *ruleset, err error, m manager) Firewall {
	return Firewall{text: describe(rs, err, m), judge: func(slot port.Slot, v6 bool, lasts time.Duration) Report {
		return judge(slot, v6, lasts, rs, err, m)
	}}
}

// describe says what the chains of incoming packets do by default.
func describe(rs *ruleset, err error, m manager) string {
	if err != nil {
		text := unread(err) + ": `" + showRules + "`"
		if m != noManager {
			text += "; " + string(m) + " manages it"
		}
		return text
	}
	var chains []string
	for _, c := range rs.chains {
		if c.isInput() && c.hook.Drop {
			chains = append(chains, c.name())
		}
	}
	slices.Sort(chains)
	switch {
	case len(chains) > 0:
		return "the firewall drops incoming connections that no rule accepts (" + strings.Join(chains, ", ") + ")"
	case rs.legacy:
		return "rules of iptables-legacy may refuse incoming connections: `sudo iptables-legacy -S INPUT`"
	case rs.hooked():
		return "the firewall lets in what no rule refuses"
	}
	return noRules
}

const (
	noRules   = "no firewall rule of this system (nftables, iptables) is about incoming connections"
	showRules = "sudo nft list ruleset"
)

// unread says that the rules could not be read.
func unread(err error) string {
	if errors.Is(err, os.ErrPermission) {
		return "the rules of the firewall can be read by root only"
	}
	return "the rules of the firewall cannot be read: " + err.Error()
}

// manager is the program that writes the rules.
type manager string

const (
	noManager manager = ""
	firewalld manager = "firewalld"
	ufw       manager = "ufw"
)

// managerOf returns the manager that is in use below a root directory.
func managerOf(root fs.FS) manager {
	if _, err := fs.Stat(root, "run/firewalld.pid"); err == nil {
		return firewalld
	}
	conf, _ := fs.ReadFile(root, "etc/ufw/ufw.conf") // readable by all
	for line := range strings.Lines(string(conf)) {
		if strings.TrimSpace(line) == "ENABLED=yes" {
			return ufw
		}
	}
	return noManager
}

// judge says what rules do; err is why they could not be read.
func judge(slot port.Slot, v6 bool, lasts time.Duration, rs *ruleset, err error, m manager) Report {
	var by string
	result := unsure
	if err == nil {
		result, by = rs.decide(slot, v6)
	}
	switch {
	case result == accepts && by == "":
		return Report{Text: noRules}
	case result == accepts:
		return Report{Text: "the firewall lets them in (" + by + ")"}
	case result == drops:
		return Report{Text: "the firewall refuses them (" + by + ")", Command: allow(slot, lasts, m, by), Refuses: true}
	}
	text := "the firewall may refuse them (" + by + " is not wholly understood)"
	if err != nil {
		text = unread(err)
	}
	if m == noManager {
		return Report{Text: text, Command: showRules}
	}
	return Report{Text: fmt.Sprintf("%s; %s manages it", text, m), Command: allow(slot, lasts, m, "")}
}

// allow is the command that lets connections in. By names the chain that drops them.
func allow(slot port.Slot, lasts time.Duration, m manager, by string) string {
	chain := strings.Fields(by) // "chain", family, table, name
	iptables := map[string]string{"chain ip filter INPUT": "iptables", "chain ip6 filter INPUT": "ip6tables"}[by]
	switch {
	case m == firewalld && lasts == 0:
		return fmt.Sprintf("sudo firewall-cmd --permanent --add-port=%s && sudo firewall-cmd --reload", slot)
	case m == firewalld:
		return fmt.Sprintf("sudo firewall-cmd --add-port=%s --timeout=%d", slot, int64(lasts.Seconds()))
	case m == ufw:
		return "sudo ufw allow " + slot.String()
	case iptables != "":
		return fmt.Sprintf("sudo %s -I INPUT -p %s --dport %d -j ACCEPT", iptables, slot.Protocol, slot.Port)
	case len(chain) == 4:
		return fmt.Sprintf("sudo nft insert rule %s %s dport %d accept", strings.Join(chain[1:], " "), slot.Protocol, slot.Port)
	}
	return showRules
}
